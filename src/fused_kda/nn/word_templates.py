"""The stories of the word problems: what is told, which numbers it takes, and which steps solve it.

A text is written in a small language: ``(one|another|)`` picks one alternative, and may be nested; ``{gain:b}`` is a
phrase of :data:`PHRASES` about number b; ``{A}``, ``{B}``, ``{C}`` are people and ``{She}``, ``{she}``, ``{her}`` is A;
``{thing}``, ``{things}`` and ``{other}``, ``{others}`` are two kinds of object, ``{eats}`` and ``{ate}`` what is done
with the first; ``{box}``, ``{boxes}`` hold them; the names of :data:`SAME` are one word or pair of words throughout a
text; ``{a}`` to ``{d}`` are numbers, ``{k}`` is a factor told in words ("twice").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SHE = _words(
    "Ann Mia Zoe Lily Eva Cara Nora Ella Ruth Lucy Maya Ivy Jane Kate Rosa Tina Vera Wendy Anna Emma Sara Amy Lena "
    "Olga Nina Clara Alice Julia Maria Sofia Grace Hanna Priya Aisha Yuki Mei Fatima Ines Laura Paula"
)
HE = _words(
    "Bob Tom Sam Max Leo Ben Dan Jack Paul Omar Finn Carl Luis Hugo Ivan Noah Adam Eric Felix Gus Henry Ian Jon Kurt "
    "Liam Mark Nick Oscar Peter Ravi Tim Victor Will Alex David James Kenji Ali Pablo George"
)
FOOD = _words(
    "apples pears oranges lemons plums bananas carrots potatoes onions eggs cookies sweets candies cakes muffins nuts "
    "grapes cherries peaches strawberries"
)
THINGS = FOOD + _words(
    "pencils pens books stamps coins cards marbles stickers shells stones buttons beads balloons balls toys dolls cars "
    "kites flowers roses tulips leaves crayons erasers photos postcards badges ribbons comics magazines tickets "
    "puzzles bottles cups plates keys rings hats feathers seeds blocks bricks notebooks"
)
BOXES = _words("boxes bags baskets jars packs crates trays bowls tins")
SINGULAR = {
    "potatoes": "potato", "candies": "candy", "leaves": "leaf", "cherries": "cherry", "peaches": "peach",
    "strawberries": "strawberry", "boxes": "box",
}  # fmt: skip
#: Choices that hold for a whole text: the names, and the words that they may stand for together.
SAME: Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("friends", "friend"): (("friends", "friend"), ("children", "child"), ("people", "person")),
    ("people",): (("people",), ("passengers",)),
    ("bus",): (("bus",), ("train",), ("tram",)),
    ("park",): (("car park",), ("parking lot",), ("garage",)),
    ("cakes",): (("cakes",), ("loaves",), ("rolls",), ("pies",), ("cookies",)),
    ("chairs",): (("chairs",), ("seats",)),
    ("weeks", "week"): (("weeks", "week"), ("days", "day"), ("months", "month")),
    ("reads", "pages"): (("reads", "pages"), ("solves", "puzzles"), ("runs", "miles"), ("walks", "km")),
    ("miles",): (("miles",), ("km",)),
    ("cows", "pigs"): (("cows", "pigs"), ("sheep", "goats"), ("ducks", "hens"), ("cats", "dogs")),
}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}

#: ``#`` is the number. Verbs in the present; a text in the past uses the keys in ``-ed`` form.
PHRASES: Mapping[str, str] = {
    "gain": "(buys|finds|gets|collects|wins|picks|is given|receives) (#|# more|# more {things}|another #|# {things})",
    "lose": (
        "(gives (#|# {things}|# of them) to (a friend|{her} friend|{B})|gives {B} (#|# {things}|# of them)"
        "|gives away (#|# {things})|gives # away|(loses|sells|{eats}|drops) (#|# {things}|# of them))"
    ),
    "gained": "(bought|found|got|collected|won|picked|was given|received) (#|# more|# more {things}|another #)",
    "lost": (
        "(gave (#|# {things}|# of them) to (a friend|{her} friend|{B})|gave {B} (#|# {things}|# of them)"
        "|gave away (#|# {things})|gave # away"
        "|(lost|sold|{ate}|dropped) (#|# {things}|# of them))"
    ),
    "earn": "(earns|gets|finds|wins|is given|saves) (#|# dollars|# more|# more dollars|another # dollars)",
    "spend": (
        "(spends (#|# dollars)( on (a {thing}|a {other}|{others}|lunch)|)|pays # dollars for (a {thing}|{others})"
        "|buys a {thing} for # dollars|gives (#|# dollars) to {B}|loses (#|# dollars))"
    ),
    "board": "# (|{people} |more |more {people} )(get on|board)",
    "leave": "# (|{people} |of them )(get off|leave)",
    "park": "# (|more |more cars |cars )(come|arrive|drive in)",
    "drive": "# (|cars |of them )(leave|drive away)",
    "return": "# (|books |more books )(are returned|come back|are added)",
    "lend": "# (|books |of them )(are lent|are borrowed|are taken out)",
}
HOW_MANY_HAVE = (
    "How many {things} (does {A} have( now| left| in the end|)|does {she} have( now| left|)|are left|remain"
    "|has {she} got now)?"
)
HOW_MANY_HAD = "How many {things} (did {A} have( then| left| in the end|)|did {she} have( then| left|)|were left)?"
HOW_MUCH_LEFT = (
    "How (much money|many dollars) (does {A} have( now| left|)|does {she} have( now| left|)|has {she} left)?"
)
TOGETHER = "How many {things} do (they|{A} and {B}) have( together| in all| altogether| in total)?"
PAY = "How (much|many dollars) does ({she}|{A}) (pay|spend)( in all| altogether| in total|)?"

Range = tuple[int, int]
START: Range = (6, 120)
CHANGE: Range = (2, 60)
FACTOR: Range = (2, 9)
TABLE: Range = (2, 12)
ANY: Range = (2, 90)


@dataclass(frozen=True)
class Template:
    """One story.

    Attributes:
        name: what it is called in counts and tests.
        text: the question, in the language of this module.
        steps: the working, e.g. ``"a+b=s s-c=r"``: each step an operation on numbers or earlier results.
        ranges: inclusive range of every number.
    """

    name: str
    text: str
    steps: str
    ranges: Mapping[str, Range] = field(default_factory=dict)


def _chains() -> Iterator[Template]:
    """Something is there, then it grows and shrinks, two or three times, in every order of the signs."""
    joints = ("{x}( and |, then |. Then {she} |. {She} ){y}.", "{x}(, |. Then {she} |. {She} ){y}(,|) and( then|) {z}.")
    places = (
        "{x}( and |, then |. Then |. Later ){y}.",
        "{x}(, |. Then |. Later ){y}( and |, then |. After that ){z}.",
    )
    worlds = (
        (
            "things",
            "{A} (has|starts with|owns) {a} {things}. {She}( then| now|) ",
            joints,
            "gain lose",
            HOW_MANY_HAVE,
        ),
        ("things had", "{A} (had|started with|owned) {a} {things}. {She} ", joints, "gained lost", HOW_MANY_HAD),
        ("money", "{A} has {a} dollars. {She} ", joints, "earn spend", HOW_MUCH_LEFT),
        (
            "bus",
            "(A {bus} has {a} {people}( on it|)|There are {a} {people} on a {bus}). ",
            places,
            "board leave",
            "How many {people} are (on the {bus}|on it|left on it|left)( now|)?",
        ),
        (
            "car park",
            "There are {a} cars in a {park}. ",
            places,
            "park drive",
            "How many cars are (in the {park}|there|left)( now|)?",
        ),
        (
            "library",
            "(A library has|There are) {a} books( on a shelf|). ",
            places,
            "return lend",
            "How many books (are there|are left|are in the library)( now|)?",
        ),
    )
    for name, opening, (two, three), verbs, question in worlds:
        up, down = verbs.split()
        for signs in ("+-", "-+", "++", "--", "+-+", "-+-", "+--", "-++"):
            told = two if len(signs) == 2 else three
            for place, sign, number in zip("xyz", signs, "bcd", strict=False):
                told = told.replace(f"{{{place}}}", f"{{{up if sign == '+' else down}:{number}}}")
            results = ("s", "r") if len(signs) == 2 else ("s", "t", "r")
            lefts = ("a", *results)
            steps = " ".join(
                f"{left}{sign}{number}={result}"
                for left, sign, number, result in zip(lefts, signs, "bcd", results, strict=False)
            )
            ranges = {"a": START, "b": CHANGE, "c": CHANGE, "d": CHANGE}
            yield Template(f"{name} {signs}", f"{opening}{told} {question}", steps, ranges)


_TIMES_STORIES = (
    Template(
        "groups, lose",
        "{A} (has|buys) {a} {boxes} (of {b} {things}|with {b} {things} (each|in each|in each {box})). "
        "{She} {lose:c}. " + HOW_MANY_HAVE,
        "a*b=s s-c=r",
        {"a": FACTOR, "b": TABLE, "c": ANY},
    ),
    Template(
        "groups, gain",
        "{A} has {a} {boxes} (of {b} {things}|with {b} {things} each|with {b} {things} in each). {She} {gain:c}. "
        + HOW_MANY_HAVE,
        "a*b=s s+c=r",
        {"a": FACTOR, "b": TABLE, "c": ANY},
    ),
    Template(
        "groups, other person",
        "{A} has {a} {boxes} with {b} {things} (in each|each). {B} has {c} {things}. " + TOGETHER,
        "a*b=s s+c=r",
        {"a": FACTOR, "b": TABLE, "c": ANY},
    ),
    Template(
        "two kinds of groups",
        "{A} has {a} {boxes} (of {b} {things}|with {b} {things} each) and {c} {boxes} (of|with) {d}( "
        "{things}|)( each|). "
        "How many {things} does ({she}|{A}) have( in all| altogether| in total|)?",
        "a*b=s c*d=t s+t=r",
        {"a": FACTOR, "b": TABLE, "c": FACTOR, "d": TABLE},
    ),
    Template(
        "groups, lose, gain",
        "{A} has {a} {boxes} (of {b} {things}|with {b} {things} each). {She} {lose:c}( and then |. Then "
        "{she} ){gain:d}. " + HOW_MANY_HAVE,
        "a*b=s s-c=t t+d=r",
        {"a": FACTOR, "b": TABLE, "c": CHANGE, "d": CHANGE},
    ),
    Template(
        "twice as many, together",
        "{A} has {a} {things}. {B} has {k} as many( {things}|)( as {A}|). " + TOGETHER,
        "a*k=s a+s=r",
        {"a": (2, 30), "k": (2, 5)},
    ),
    Template(
        "twice as many, lose",
        "{A} has {a} {things}. {B} has {k} as many( {things}|)( as {A}|). {B} (loses|gives away|sells) "
        "{c}( of them|). "
        "How many {things} does {B} have( now| left|)?",
        "a*k=s s-c=r",
        {"a": (2, 30), "k": (2, 5), "c": CHANGE},
    ),
    Template(
        "half, gain",
        "{A} has {a} {things}. {She} (gives half of them to {B}|gives {B} half of them|loses half of them|sells half)"
        "( and |. Then {she} ){gain:c}. " + HOW_MANY_HAVE,
        "a/k=s s+c=r",
        {"a": START, "k": (2, 2), "c": CHANGE},
    ),
    Template(
        "a day, then more",
        "{A} {reads} {a} {pages} (a|each|every) day for {b} days( and|. Then {she} {reads}) {c} (more |)on "
        "(Sunday|Saturday|the last day). How many {pages} is that( in all| altogether| in total|)?",
        "a*b=s s+c=r",
        {"a": TABLE, "b": FACTOR, "c": CHANGE},
    ),
    Template(
        "hens",
        "(A farmer has {a} hens. Each hen lays {b} eggs( a week|)|{a} hens lay {b} eggs each). "
        "(The farmer|{A}) (sells|uses|breaks) {c}( eggs| of them|). How many eggs are left?",
        "a*b=s s-c=r",
        {"a": FACTOR, "b": TABLE, "c": ANY},
    ),
    Template(
        "rows of chairs",
        "(A hall|A room|A classroom|A theater) has {a} rows (of {b} {chairs}|with {b} {chairs} each). "
        "{c} ({chairs} |of them |)are (taken away|broken|taken|occupied). How many {chairs} are (left|free)?",
        "a*b=s s-c=r",
        {"a": FACTOR, "b": TABLE, "c": ANY},
    ),
    Template(
        "garden rows",
        "{A} plants {a} rows (of {b} {things}|with {b} {things} each) and {c} rows (of|with) {d} {others}( each|). "
        "How many plants are (there|in the garden)( in all| altogether| in total|)?",
        "a*b=s c*d=t s+t=r",
        {"a": FACTOR, "b": TABLE, "c": FACTOR, "d": TABLE},
    ),
)

_MONEY_STORIES = (
    Template(
        "shopping for two kinds",
        "A {thing} costs {a} dollars and a {other} costs {b} dollars. {A} buys {c} {things} and (a|one) {other}. "
        + PAY,
        "c*a=s s+b=r",
        {"a": TABLE, "b": CHANGE, "c": FACTOR},
    ),
    Template(
        "two prices, two counts",
        "A {thing} costs {a} dollars( and|.) (a|one) {other} costs {b} dollars. {A} buys {c} {things} "
        "and {d} {others}. " + PAY,
        "c*a=s d*b=t s+t=r",
        {"a": TABLE, "b": TABLE, "c": FACTOR, "d": FACTOR},
    ),
    Template(
        "change",
        "{A} has {a} dollars. {She} buys {b} {things} (for|at) {c} dollars each. " + HOW_MUCH_LEFT,
        "b*c=s a-s=r",
        {"a": (20, 150), "b": FACTOR, "c": TABLE},
    ),
    Template(
        "saving",
        "{A} saves {a} dollars (each|every|a) {week} for {b} {weeks}. "
        "(Then {she} spends|{She} spends|{She} then spends) {c} dollars( on (a {thing}|{others})|). " + HOW_MUCH_LEFT,
        "a*b=s s-c=r",
        {"a": TABLE, "b": FACTOR, "c": ANY},
    ),
    Template(
        "earning by the hour",
        "{A} earns {a} dollars (an|per|each|every) hour. {She} works {b} hours on (Monday|Friday) and "
        "{c}( hours|) on "
        "(Tuesday|Sunday|Saturday). How (much|much money|many dollars) does {she} earn( in all| altogether|)?",
        "b+c=s s*a=r",
        {"a": TABLE, "b": FACTOR, "c": FACTOR},
    ),
    Template(
        "tickets",
        "(A ticket|An adult ticket|A ticket for adults) costs {a} dollars and (a child ticket|a ticket for children) "
        "costs {b} dollars. How (much|many dollars) do {c} adults and {d} children pay( in all| "
        "altogether| together|)?",
        "c*a=s d*b=t s+t=r",
        {"a": TABLE, "b": TABLE, "c": FACTOR, "d": FACTOR},
    ),
)

_SHARE_STORIES = (
    Template(
        "gain, share",
        "{A} has {a} {things}( and {gain:b}|. {She} {gain:b}). {She} (shares|divides|splits) (them|all "
        "of them|the {things}) "
        "equally (among|between) {c} {friends}. How many( {things}|) does each (one|{friend}) get?",
        "a+b=s s/c=r",
        {"a": START, "b": CHANGE, "c": FACTOR},
    ),
    Template(
        "lose, share",
        "{A} has {a} {things}. {She} ({eats}|keeps|loses|sells) {b}( of them|) and "
        "(shares|divides|splits) the rest equally "
        "(among|between) {c} {friends}. How many( {things}|) does each (one|{friend}) get?",
        "a-b=s s/c=r",
        {"a": START, "b": CHANGE, "c": FACTOR},
    ),
    Template(
        "pack, sell boxes",
        "{A} (packs|puts) {a} {things} (in|into) {boxes} of {b}. {She} (sells|gives away) {c}( {boxes}| "
        "of the {boxes}|). "
        "How many {boxes} (are left|does {she} have left)?",
        "a/b=s s-c=r",
        {"a": (12, 99), "b": FACTOR, "c": FACTOR},
    ),
    Template(
        "pack, add",
        "{A} (shares|divides|splits) {a} {things} equally (among|between) {b} {friends}. {B} is one of "
        "them and (already has|had) {c}( {things}|). How many {things} does {B} have( now|)?",
        "a/b=s s+c=r",
        {"a": (12, 99), "b": FACTOR, "c": CHANGE},
    ),
)

_OTHER_STORIES = (
    Template(
        "more, together",
        "{A} has {a} {things}. {B} has {b} more( {things}|) than {A}. " + TOGETHER,
        "a+b=s a+s=r",
        {"a": ANY, "b": CHANGE},
    ),
    Template(
        "fewer, together",
        "{A} has {a} {things}. {B} has {b} (fewer|less)( {things}|) than {A}. " + TOGETHER,
        "a-b=s a+s=r",
        {"a": START, "b": CHANGE},
    ),
    Template(
        "more, fewer",
        "{A} has {a} {things}. {B} has {b} more( {things}|) than {A}( and|.) {C} has {c} (fewer|less)( "
        "{things}|) than {B}. "
        "How many {things} does {C} have?",
        "a+b=s s-c=r",
        {"a": ANY, "b": CHANGE, "c": CHANGE},
    ),
    Template(
        "ages",
        "{A} is {a} years old. {B} is {b} years older than {A}( and|.) {C} is {c} years younger than "
        "{B}. How old is {C}?",
        "a+b=s s-c=r",
        {"a": (3, 70), "b": (2, 40), "c": (2, 40)},
    ),
    Template(
        "three people",
        "{A} has {a} {things}, {B} has {b}( {things}|) and {C} has {c}( {things}|). "
        "How many {things} do they have( together| in all| altogether| in total)?",
        "a+b=s s+c=r",
        {"a": ANY, "b": ANY, "c": ANY},
    ),
    Template(
        "book pages",
        "A book has {a} pages. {A} reads {b} pages on (Monday|Friday|the first day) and {c}( pages|) on "
        "(Tuesday|Sunday|the second day). How many pages (are left|are left to read|does {she} still have to read)?",
        "a-b=s s-c=r",
        {"a": (30, 200), "b": ANY, "c": CHANGE},
    ),
    Template(
        "book pages a day",
        "A book has {a} pages. {A} reads {b} pages (a|each|every) day for {c} days. "
        "How many pages (are left|are left to read|does {she} still have to read)?",
        "b*c=s a-s=r",
        {"a": (30, 200), "b": TABLE, "c": FACTOR},
    ),
    Template(
        "farm",
        "(There are|A farmer has) {a} {cows} and {b} {pigs}( on a farm|). "
        "(The farmer sells|{A} buys) {c} (of them|of the animals|animals). How many animals are left?",
        "a+b=s s-c=r",
        {"a": ANY, "b": ANY, "c": CHANGE},
    ),
    Template(
        "baker",
        "A baker (bakes|makes) {a} {cakes} in the morning and {b}( more|) in the afternoon. "
        "(He|She|The baker) sells {c}( of them|). How many {cakes} are left?",
        "a+b=s s-c=r",
        {"a": ANY, "b": CHANGE, "c": CHANGE},
    ),
    Template(
        "three colors",
        "(A {box}|{A}) has {a} red( {things}|), {b} blue( {things}|) and {c} green {things}. "
        "{d} (of them |{things} |)are (taken out|lost|sold|given away). How many {things} are left?",
        "a+b=s s+c=t t-d=r",
        {"a": CHANGE, "b": CHANGE, "c": CHANGE, "d": CHANGE},
    ),
    Template(
        "two games",
        "{A} scores {a} points in the first game and {b} (points more|more points|more) in the second( "
        "game|) than in the first. "
        "How many points does {she} (score|have)( in all| altogether| in total)?",
        "a+b=s a+s=r",
        {"a": ANY, "b": CHANGE},
    ),
    Template(
        "trip",
        "A (train|bus|truck) (goes|drives|travels) {a} {miles} to the first (stop|town), {b} to the "
        "second( one|) and "
        "{c} to the third( one|). How (far is that|many {miles} is that)( in all| altogether| in total|)?",
        "a+b=s s+c=r",
        {"a": ANY, "b": ANY, "c": ANY},
    ),
)

TEMPLATES: tuple[Template, ...] = (
    *_chains(),
    *_TIMES_STORIES,
    *_MONEY_STORIES,
    *_SHARE_STORIES,
    *_OTHER_STORIES,
)
