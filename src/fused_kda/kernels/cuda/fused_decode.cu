// One decode step of a KDA layer's core, one launch: causal conv1d update, gated delta rule, gated RMSNorm.
//
// Per row and head, D = K = V = 128, W = 4 taps, everything in fp32 from the convolution to y:
//
//   c = bias + sum_t weight[t] * [tap0, tap1, tap2, x][t];  q, k, v = silu(c);  window <- [tap1, tap2, x]
//   q' = q * rsqrt(q.q + 1e-6) * scale;  k' = k * rsqrt(k.k + 1e-6);  z = raw_g + dt_bias;  a = exp(A_log)
//   decay = exp(lower_bound * sigmoid(a * z))  or  exp(-a * softplus(z))          one value per K channel
//   S <- S * decay;  d = (v - S k') * sigmoid(raw_beta);  o = S q' + d * (k'.q');  S <- S + d k'^T
//   y = o * rsqrt(mean(o^2) + norm_eps) * norm_weight * sigmoid(output_gate)
//
// o is taken from the decayed, not yet updated state, so that one pass gives both dot products. q and k enter the dots
// unnormalised; their norms are three more dots of the same lanes and scale the sums afterwards.
// Bits do not depend on the launch shape: a dot over K is always the same 16 lanes with the same 8 elements each, in
// one order, and the mean over V one tree over 128 values in shared memory. No contraction (--fmad=false): every fma is
// written out. NVRTC compiles this file alone; the macros (specialisation, launch shape) come from compile.py.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
struct bf16 {
  u16 bits;
};
struct absent {};

template <class T> constexpr bool present = true;
template <> constexpr bool present<absent> = false;

constexpr int DIM = 128, WIDTH = 4, TAPS = WIDTH - 1;
constexpr i64 INNER = i64(HEADS) * DIM;  // P, the channels of q, of k, of v
constexpr int LANES = 16;                // lanes that share one row of S
constexpr int OWN = DIM / LANES;         // elements of a row in one lane
constexpr int ROWS = DIM / SPLIT;        // rows of S (V channels) of this CTA
constexpr int GROUPS = THREADS / LANES;  // rows in work at once
constexpr int PASSES = ROWS / GROUPS;
constexpr int SECTION = DIM;              // threads that prepare one of q, k, v, decay
constexpr int TEAMS = THREADS / SECTION;  // sections prepared at once
constexpr int ITEMS = 4 / TEAMS;          // sections per thread
constexpr bool WIDE_STATE = sizeof(STATE) == 4;
constexpr int VECTORS = OWN * sizeof(STATE) / 16;  // 16-byte pieces of a row in one lane
constexpr bool STAGED = BULK || SPLIT == 1;        // the new window goes through shared memory, for wide stores
constexpr bool DENSE_WINDOW = CONV_CHANNEL == 1 || CONV_CHANNEL == TAPS;
constexpr u32 CHUNK_BYTES = CHUNK * GROUPS * DIM * sizeof(STATE);
constexpr float QK_EPS = 1e-6f;
enum Section { Q, K, V, DECAY };

static_assert((THREADS == 128 || THREADS == 256) && (STATE_ALIGNED || !BULK));
static_assert(PASSES % CHUNK == 0 && PASSES * GROUPS * SPLIT == DIM);

// Pointers in the order of contract.Tensors; strides and pitches in elements.
struct Params {
  const bf16* x;
  const WEIGHT* weight;
  const BIAS* bias;
  bf16* conv;
  const bf16 *raw_g, *raw_beta;
  const float *a_log, *dt_bias;
  const INDEX* index;
  STATE* state;
  bf16* out;
  const bf16* gate;
  const NORM* norm;
  const u8* initial;
  i64 x_row, g_row, beta_row, gate_row, out_row, index_stride, initial_stride, conv_pitch, state_pitch, slots,
      null_slot;
  float lower_bound, norm_eps, scale;
};

#define DEVICE __device__ __forceinline__

DEVICE float to_float(absent) { return 0.0f; }
DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return __uint_as_float(u32(value.bits) << 16); }
DEVICE u32 to_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
DEVICE bf16 to_bf16(float value) { return bf16{u16(to_bf16x2(value, 0.0f))}; }
DEVICE float reciprocal(float value) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float sigmoid(float value) { return reciprocal(1.0f + expf(-value)); }
DEVICE float softplus(float value) { return value > 20.0f ? value : log1pf(expf(value)); }
DEVICE float reduce_lanes(float value) {
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
DEVICE u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// ---- The previous kernel on the stream, the copy engine, the cluster: SM90 and later.
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_start() {}
#endif
DEVICE void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
  } while (!done);
}
DEVICE void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
DEVICE void send(u32 target, float value, u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, %0, %3; mapa.shared::cluster.u32 b, %2, %3;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [t], %1, [b]; }" ::"r"(target),
      "r"(__float_as_uint(value)), "r"(barrier), "r"(rank)
      : "memory");
}

// Starts the state's way into L2 and reads nothing: sound even where the previous kernel still writes the index (then
// the hint may name another slot) or the slot (L2 is where its stores arrive).
DEVICE void hint_state(const Params& p, i64 row, int head, int part) {
  const i64 slot = *static_cast<const volatile INDEX*>(p.index + row * p.index_stride);
  if (!STATE_ALIGNED || slot <= p.null_slot || slot >= p.slots) return;
  const STATE* state = p.state + slot * p.state_pitch + (i64(head) * DIM + part * ROWS) * DIM;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(state), "n"(ROWS * DIM * sizeof(STATE)) : "memory");
}

// ---- Rows of the state: 8 elements per lane, fp32 as [4l, 4l+4) and [64+4l, 64+4l+4), bf16 as [8l, 8l+8).
DEVICE int own_offset(int lane, int half) { return WIDE_STATE ? half * 64 + 4 * lane : 8 * lane + 4 * half; }

DEVICE void load_vectors(uint4 (&raw)[VECTORS], const STATE* row, int lane) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const STATE* source = row + own_offset(lane, j);
    if constexpr (STATE_ALIGNED) {
      raw[j] = *reinterpret_cast<const uint4*>(source);
    } else if constexpr (WIDE_STATE) {
      const u32* word = reinterpret_cast<const u32*>(source);
      raw[j] = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
      const u16* half = reinterpret_cast<const u16*>(source);
      raw[j] = make_uint4(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16,
                          half[6] | half[7] << 16);
    }
  }
}
DEVICE void store_vectors(STATE* row, int lane, const uint4 (&raw)[VECTORS]) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    STATE* target = row + own_offset(lane, j);
    const u32 words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
    if constexpr (STATE_ALIGNED) {
      *reinterpret_cast<uint4*>(target) = raw[j];
    } else if constexpr (WIDE_STATE) {
#pragma unroll
      for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(target)[i] = words[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) reinterpret_cast<u16*>(target)[i] = u16(words[i / 2] >> i % 2 * 16);
    }
  }
}
DEVICE void unpack(float (&value)[OWN], const uint4 (&raw)[VECTORS]) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const u32 words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (WIDE_STATE)
        value[4 * j + i] = __uint_as_float(words[i]);
      else
        value[2 * i] = __uint_as_float(words[i] << 16), value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}
DEVICE void pack(uint4 (&raw)[VECTORS], const float (&value)[OWN]) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = WIDE_STATE ? __float_as_uint(value[4 * j + i]) : to_bf16x2(value[2 * i], value[2 * i + 1]);
    raw[j] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
DEVICE void load_own(float (&value)[OWN], const float* shared, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = *reinterpret_cast<const float4*>(shared + own_offset(lane, half));
    value[4 * half] = four.x, value[4 * half + 1] = four.y, value[4 * half + 2] = four.z, value[4 * half + 3] = four.w;
  }
}

// The history of one channel. DS has the three taps side by side: with the copy engine at work, a word (at whichever is
// an even element) and a half take less of the load units; in a cluster, taking them apart costs more than that.
DEVICE void load_taps(bf16 (&tap)[TAPS], const bf16* first, bool odd, bool started) {
  if constexpr (BULK && CONV_TAP == 1 && CONV_ALIGNED) {
    const u32 word = started ? *reinterpret_cast<const u32*>(first + (odd ? 1 : 0)) : 0;
    const bf16 half = started ? first[odd ? 0 : 2] : bf16{0}, low{u16(word)}, high{u16(word >> 16)};
    tap[0] = odd ? half : low, tap[1] = odd ? low : high, tap[2] = odd ? high : half;
  } else {
#pragma unroll
    for (int t = 0; t < TAPS; ++t) tap[t] = started ? first[t * i64(CONV_TAP)] : bf16{0};
  }
}

// ---- The conv window of one section: `count` channels staged in shared memory in the pool's own order, then copied.
DEVICE int staged(int channel, int tap, int count) {
  return CONV_CHANNEL == 1 ? tap * count + channel : channel * TAPS + tap;
}
DEVICE void store_window(bf16* pool, const bf16* stage, int count) {  // pool: the section's first channel, tap 0
  const int thread = THREADS - 1 - threadIdx.x;  // from the last warp on: the first ones have the output to write
  constexpr bool WIDE = CONV_ALIGNED && DENSE_WINDOW;
  const int pieces = WIDE ? TAPS * count / 8 : TAPS * count;
#pragma unroll
  for (int base = 0; base < pieces; base += THREADS) {
    const int i = base + thread;
    if (i >= pieces) continue;
    if constexpr (WIDE) {
      const i64 at = CONV_CHANNEL == 1 ? (8 * i / count) * i64(CONV_TAP) + 8 * i % count : 8 * i;
      *reinterpret_cast<uint4*>(pool + at) = *reinterpret_cast<const uint4*>(stage + 8 * i);
    } else {
      pool[i % count * i64(CONV_CHANNEL) + i / count * i64(CONV_TAP)] = stage[staged(i % count, i / count, count)];
    }
  }
}

// What one thread loads of a channel of a section, unconverted: a conversion before the wait would wait for the load.
struct Item {
  WEIGHT weight[WIDTH];
  BIAS bias;
  NORM norm;               // section V
  float dt_bias;           // section DECAY
  bf16 tap[TAPS], x, act;  // act: raw_g (DECAY), output gate (V)
};

// Grid: B * HEADS * SPLIT CTAs, one-dimensional; the SPLIT CTAs of a (row, head) are one cluster.
extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
    __launch_bounds__(THREADS, MIN_CTAS) fused_kda_decode(const __grid_constant__ Params p) {
  __shared__ alignas(16) float shared_q[DIM], shared_k[DIM], shared_decay[DIM], shared_y[DIM], shared_v[ROWS];
  __shared__ alignas(16) bf16 window[2 * TAPS * DIM + TAPS * ROWS];
  __shared__ alignas(8) i64 barriers[PASSES / CHUNK + 1];
  extern __shared__ __align__(128) u8 tile[];

  const int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES;
  const int part = SPLIT == 1 ? 0 : blockIdx.x % SPLIT;
  const int head = blockIdx.x / SPLIT % HEADS;
  const i64 row = blockIdx.x / (SPLIT * HEADS);
  const u32 y_barrier = shared_address(&barriers[PASSES / CHUNK]);
  const INDEX* const index = p.index + row * p.index_stride;
  i64 slot;
  if constexpr (PREFETCH) slot = *index;

  if constexpr (BULK || SPLIT > 1) {
    if (thread == 0) {
#pragma unroll
      for (int i = BULK ? 0 : PASSES / CHUNK; i <= PASSES / CHUNK; ++i) barrier_init(shared_address(&barriers[i]));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  if constexpr (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  if constexpr (!PREFETCH) {
    if (HINT && thread == 0) hint_state(p, row, head, part);
    wait_for_previous_kernel();
    let_next_kernel_start();
    slot = *index;
  }
  const bool live = slot > p.null_slot && slot < p.slots;
  const bool started = live && (!INITIAL || p.initial[row * p.initial_stride] != 0);
  i64 tile_offset = (live ? slot : 0) * p.state_pitch + (i64(head) * DIM + part * ROWS) * DIM;
  asm("" : "+l"(tile_offset));  // hidden: where HEADS is 2^n the compiler made four narrow stores of each wide one
  STATE* const state = p.state + tile_offset;
  bf16* const conv = p.conv + (live ? slot : 0) * p.conv_pitch + head * i64(DIM) * CONV_CHANNEL;

  if constexpr (BULK) {
    if (thread == 0 && started) {
#pragma unroll
      for (int i = 0; i < PASSES / CHUNK; ++i) {
        const u8* source = reinterpret_cast<const u8*>(state) + i * CHUNK_BYTES;
        bulk_load(shared_address(tile) + i * CHUNK_BYTES, source, CHUNK_BYTES, shared_address(&barriers[i]));
      }
    }
  }

  uint4 held[BULK ? 1 : PASSES][VECTORS];
  const auto load_state = [&] {
    if constexpr (!BULK) {
#pragma unroll
      for (int t = 0; t < PASSES; ++t) {
        if (started) {
          load_vectors(held[t], state + (t * GROUPS + group) * DIM, lane);
        } else {
#pragma unroll
          for (int j = 0; j < VECTORS; ++j) held[t][j] = make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  Item items[ITEMS];
  const int team = TEAMS == 1 ? 0 : thread / SECTION;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    Item& item = items[i];
    const int section = team + i * TEAMS;
    const int local = thread % SECTION, channel = section == V ? part * ROWS + local % ROWS : local;
    if (section != DECAY) {
      const WEIGHT* weight = p.weight + section * i64(W_PLANE) + (head * DIM + channel) * i64(W_CHANNEL);
#pragma unroll
      for (int t = 0; t < WIDTH; ++t) item.weight[t] = weight[t * i64(W_TAP)];
      if constexpr (present<BIAS>) item.bias = p.bias[section * INNER + head * DIM + channel];
      const bf16* taps = conv + (section * INNER + channel) * CONV_CHANNEL;
      load_taps(item.tap, taps, channel * CONV_CHANNEL % 2, started);
    } else {
      item.dt_bias = p.dt_bias[head * DIM + channel];
    }
    if constexpr (present<NORM>) {
      if (section == V) item.norm = p.norm[channel];
    }
  }
  const float a_log = p.a_log[head];

  if constexpr (PREFETCH) {
    load_state();
    wait_for_previous_kernel();
    let_next_kernel_start();
  }

  if (!live) {
    if (thread < ROWS) p.out[row * p.out_row + head * DIM + part * ROWS + thread] = bf16{0};
    if constexpr (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    Item& item = items[i];
    const int section = team + i * TEAMS;
    const int local = thread % SECTION, channel = section == V ? part * ROWS + local % ROWS : local;
    if (section != DECAY) item.x = p.x[row * p.x_row + section * INNER + head * DIM + channel];
    if (section == DECAY) item.act = p.raw_g[row * p.g_row + head * DIM + channel];
    if constexpr (present<NORM>) {
      if (section == V) item.act = p.gate[row * p.gate_row + head * DIM + channel];
    }
  }
  const float beta = sigmoid(to_float(p.raw_beta[row * p.beta_row + head]));
  if constexpr (!PREFETCH) load_state();

  // Convolution, SiLU, decay: one channel of one section per item.
  float gain = 0.0f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    Item& item = items[i];
    const int section = team + i * TEAMS, local = thread % SECTION;
    if (section == DECAY) {
      const float a = expf(a_log), z = to_float(item.act) + item.dt_bias;
      shared_decay[local] = expf(BOUNDED ? p.lower_bound * sigmoid(a * z) : -a * softplus(z));
      continue;
    }
    float sum = to_float(item.bias);
#pragma unroll
    for (int t = 0; t < TAPS; ++t) sum = fmaf(to_float(item.weight[t]), to_float(item.tap[t]), sum);
    sum = fmaf(to_float(item.weight[TAPS]), to_float(item.x), sum);
    sum *= sigmoid(sum);
    const int count = section == V ? ROWS : DIM;
    if (local < count) {
      (section == Q ? shared_q : section == K ? shared_k : shared_v)[local] = sum;
      bf16* stage = window + section * TAPS * DIM;
      const bf16 taps[TAPS] = {item.tap[1], item.tap[2], item.x};
#pragma unroll
      for (int t = 0; STAGED && t < TAPS; ++t) stage[staged(local, t, count)] = taps[t];
    }
    if (section == V) gain = present<NORM> ? to_float(item.norm) * sigmoid(to_float(item.act)) : 1.0f;
  }
  __syncthreads();
#ifdef FUSED_KDA_FAULT  // a statement that only the sanitizer lane defines, to show that its tools see a fault
  FUSED_KDA_FAULT;
#endif
  if (thread == 0) {  // bytes may arrive before they are expected
#pragma unroll
    for (int i = 0; BULK && started && i < PASSES / CHUNK; ++i)
      barrier_expect(shared_address(&barriers[i]), CHUNK_BYTES);
    if (SPLIT > 1) barrier_expect(y_barrier, DIM * sizeof(float));
  }

  // Both dots of every row over the decayed state, then the update.
  float q[OWN], k[OWN], decay[OWN];
  load_own(q, shared_q, lane);
  load_own(k, shared_k, lane);
  load_own(decay, shared_decay, lane);
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
  for (int e = 0; e < OWN; ++e) qq = fmaf(q[e], q[e], qq), kk = fmaf(k[e], k[e], kk), qk = fmaf(q[e], k[e], qk);
  const float q_scale = rsqrtf(reduce_lanes(qq) + QK_EPS) * p.scale, k_scale = rsqrtf(reduce_lanes(kk) + QK_EPS);
  const float similarity = reduce_lanes(qk) * (q_scale * k_scale);
  if constexpr (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

#pragma unroll
  for (int first = 0; first < PASSES; first += CHUNK) {
    float s[CHUNK][OWN], u[CHUNK], o[CHUNK];
    if constexpr (BULK) {
      if (started) barrier_wait(shared_address(&barriers[first / CHUNK]));
    }
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
      if constexpr (BULK) {
        uint4 raw[VECTORS];
        const STATE* source = reinterpret_cast<const STATE*>(tile) + ((first + t) * GROUPS + group) * DIM;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
          raw[j] = started ? *reinterpret_cast<const uint4*>(source + own_offset(lane, j)) : make_uint4(0, 0, 0, 0);
        unpack(s[t], raw);
      } else {
        unpack(s[t], held[first + t]);
      }
      u[t] = o[t] = 0.0f;
#pragma unroll
      for (int e = 0; e < OWN; ++e) {
        s[t][e] *= decay[e];
        u[t] = fmaf(s[t][e], k[e], u[t]);
        o[t] = fmaf(s[t][e], q[e], o[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) u[t] = reduce_lanes(u[t]), o[t] = reduce_lanes(o[t]);
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
      const float delta = (shared_v[(first + t) * GROUPS + group] - u[t] * k_scale) * beta;
      o[t] = fmaf(delta, similarity, o[t] * q_scale);
      u[t] = delta * k_scale;
    }
    if (lane < SPLIT) {  // y, to every CTA of the cluster
#pragma unroll
      for (int t = 0; t < CHUNK; ++t) {
        float* target = shared_y + part * ROWS + (first + t) * GROUPS + group;
        if constexpr (SPLIT > 1)
          send(shared_address(target), o[t], y_barrier, lane);
        else
          *target = o[t];
      }
    }
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
#pragma unroll
      for (int e = 0; e < OWN; ++e) s[t][e] = fmaf(u[t], k[e], s[t][e]);
      uint4 raw[VECTORS];
      pack(raw, s[t]);
      store_vectors(state + ((first + t) * GROUPS + group) * DIM, lane, raw);
    }
  }

  // y: the threads of section V hold their channel's gain. A CTA that has all 128 values of y knows, too, that every
  // CTA of its cluster has read the history of q and k.
  const int v = thread % SECTION;
  if constexpr (SPLIT > 1)
    barrier_wait(y_barrier);
  else
    __syncthreads();
  if (team == V % TEAMS && v / 32 * 32 < ROWS) {  // whole warps, for the shuffles
    float y = shared_y[part * ROWS + v % ROWS];
    if constexpr (present<NORM>) {
      const float4 four = *reinterpret_cast<const float4*>(shared_y + thread % 32 * 4);
      float sum = fmaf(four.w, four.w, fmaf(four.z, four.z, fmaf(four.y, four.y, four.x * four.x)));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      y = y * rsqrtf(sum * (1.0f / DIM) + p.norm_eps) * gain;
    }
    if (v < ROWS) p.out[row * p.out_row + head * DIM + part * ROWS + v] = to_bf16(y);
  }
  if constexpr (STAGED) {
    if (part == 0) store_window(conv + Q * INNER * CONV_CHANNEL, window, DIM);
    if (part == SPLIT - 1) store_window(conv + K * INNER * CONV_CHANNEL, window + TAPS * DIM, DIM);
    store_window(conv + (V * INNER + part * ROWS) * CONV_CHANNEL, window + 2 * TAPS * DIM, ROWS);
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int section = team + i * TEAMS, local = thread % SECTION;
      const bool mine = section == V ? local < ROWS : section != DECAY && part == (section == Q ? 0 : SPLIT - 1);
      if (!mine) continue;
      bf16* pool = conv + (section * INNER + (section == V ? part * ROWS : 0) + local) * CONV_CHANNEL;
      pool[0] = items[i].tap[1], pool[CONV_TAP] = items[i].tap[2], pool[2 * i64(CONV_TAP)] = items[i].x;
    }
  }
}
