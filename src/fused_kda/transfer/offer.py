"""An offer: what a prefill rank tells its readers about slots that are ready."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

import torch

from .layout import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Offer:
    """Slots that one agent lets others read.

    Attributes:
        agent: the owner's name.
        number: of the offer, unique for its agent.
        slots: the owner's slots, in the order in which a reader gets them.
        generations: what the owner's generation counter of each slot says as long as the offer stands.
        checksums: int64 ``[slots, layers, heads of the owner]``, see :func:`fused_kda.transfer.checksum.checksums`.
    """

    agent: str
    number: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    checksums: torch.Tensor

    def to_json(self) -> str:
        """The form that travels with a request. :meth:`from_json` gives the offer back."""
        return json.dumps(
            {
                "agent": self.agent,
                "number": self.number,
                "slots": self.slots,
                "generations": self.generations,
                "shape": list(self.checksums.shape),
                "checksums": base64.b64encode(self.checksums.numpy().tobytes()).decode(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Offer:
        """Read an offer.

        Raises:
            LayoutMismatch: the text is no offer.
        """
        try:
            fields = json.loads(text)
            raw = bytearray(base64.b64decode(fields["checksums"], validate=True))
            sums = torch.frombuffer(raw, dtype=torch.int64).view(fields["shape"])
            offer = cls(
                str(fields["agent"]),
                int(fields["number"]),
                tuple(map(int, fields["slots"])),
                tuple(map(int, fields["generations"])),
                sums,
            )
        except (ValueError, TypeError, KeyError, RuntimeError, binascii.Error) as error:
            raise LayoutMismatch(f"offer: expected what Offer.to_json gives, got {text[:40]!r}") from error
        if not offer.slots or sums.ndim != 3 or not len(offer.slots) == len(offer.generations) == sums.shape[0]:
            raise LayoutMismatch(
                f"offer: expected a generation and a row of checksums for each of >= 1 slots, got {len(offer.slots)} "
                f"slots, {len(offer.generations)} generations, checksums {list(sums.shape)}"
            )
        return offer
