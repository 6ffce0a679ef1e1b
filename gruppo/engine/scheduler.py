"""Which completions run when. Plain Python: it counts places and rows and uses no tensors.

    waiting ──admit──► live ──finish──► done
       ▲ one entry per distinct prompt, with the completions it still owes

A completion is admitted only with its whole tail reserved, so a running batch never runs out of memory. When it ends,
its tail is freed at once; the prompt's prefix is freed when the last completion of the prompt has ended.

In a block of turns (turns.py) both are kept for the next call, unless the room is needed.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gruppo.engine.kv import RangeAllocator


@dataclass(frozen=True)
class KeptTurn:
    """A finished completion and the ranges of the pool that hold its KV cache.

    Example, a prompt of four tokens and three sampled ones, the last of which was never fed to the model:
        KeptTurn(ids=(5, 6, 7, 8, 9, 9, 2), ranges=((0, 3), (10, 3)))
    """

    ids: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # (start, length): the prefix of its prompt, if it has one, and its tail

    def free(self, places: RangeAllocator) -> None:
        for start, _ in self.ranges:
            places.give_back(start)


@dataclass
class PromptWork:
    """A distinct prompt and the completions it owes. All but its last token are encoded once, as a shared prefix."""

    ids: tuple[int, ...]
    tail_tokens: int  # places that one completion needs, at most: one for each token that is fed to the model
    owed: deque[int] = field(default_factory=deque)  # completions not admitted yet, by number
    start: int | None = None  # of the prefix in the pool
    live: int = 0
    kept: KeptTurn | None = None  # an earlier turn that the prompt begins with
    copied: tuple[tuple[int, int], ...] = ()  # the ranges of that turn, to be copied to `start`

    @property
    def prefix_length(self) -> int:
        return len(self.ids) - 1

    @property
    def past(self) -> int:
        """Tokens of the prefix that need not be encoded."""
        return sum(length for _, length in self.copied)


@dataclass(frozen=True)
class Entry:
    """An admitted completion: its number, its prompt, and where its tail begins."""

    completion: int
    prompt: PromptWork
    tail_start: int


@dataclass(frozen=True)
class Admission:
    """What is admitted now: prompts whose prefix must be encoded first, and completions."""

    prompts: list[PromptWork]
    entries: list[Entry]


class Scheduler:
    """Admits waiting completions in order, as places and rows allow."""

    def __init__(self, prompts: Iterable[PromptWork], places: RangeAllocator, rows: int, *, keeps: bool = False):
        self.waiting = deque(prompt for prompt in prompts if prompt.owed)
        largest = max((prompt.prefix_length + prompt.tail_tokens for prompt in self.waiting), default=0)
        if largest > places.size:
            raise ValueError(f"A prompt and one completion need {largest} places, but there are {places.size}.")
        self.places = places
        self.rows = rows
        self.keeps = keeps
        self.live: dict[int, Entry] = {}
        self.ended: dict[int, KeptTurn] = {}  # completions that are kept, with the ids of the prompt alone
        self._needed = 0  # places in use, without those of kept turns
        # A new prompt costs a forward pass that all other rows wait for, so wait until several rows are free.
        self._enough_rows = max(rows // 8, 1)

    @property
    def finished(self) -> bool:
        return not self.live and not self.waiting

    def admit(self) -> Admission:
        """Admit what fits. When nothing is live, something always fits.

        The largest request fits an empty pool. A prefix in the middle of the pool that leaves too little room on
        either side is placed again.
        """
        prompts: list[PromptWork] = []
        entries: list[Entry] = []
        worth_a_pass = not self.live or self.rows - len(self.live) >= self._enough_rows
        while self.waiting and len(self.live) < self.rows:
            prompt = self.waiting[0]
            if prompt.start is None:
                if not worth_a_pass or not self._place(prompt):
                    break
                prompts.append(prompt)
            tail_start = self._take(prompt.tail_tokens)
            if tail_start is None and not self.live:
                self._lift(prompt)
                prompts = []  # it can contain only this prompt
                continue
            if tail_start is None:
                break
            entry = Entry(prompt.owed.popleft(), prompt, tail_start)
            prompt.live += 1
            self.live[entry.completion] = entry
            entries.append(entry)
            if not prompt.owed:
                self.waiting.popleft()
        return Admission(prompts, entries)

    def finish(self, completion: int, written: int = 0) -> None:
        """A completion has ended: free its tail, and its prompt if it was the last one.

        If turns are kept, its first `written` tokens stay in the pool for a later turn.
        """
        entry = self.live.pop(completion)
        prompt = entry.prompt
        self._needed -= prompt.tail_tokens
        if self.keeps and written:
            self.ended[completion] = self._keep(entry, written)
        else:
            self.places.give_back(entry.tail_start)
        prompt.live -= 1
        if not prompt.live and not prompt.owed:
            self._lift(prompt)

    def _place(self, prompt: PromptWork) -> bool:
        """Find room for a prefix. Its kept turn is freed now; the runner copies it before anything is written."""
        start = self._take(prompt.prefix_length) if prompt.prefix_length else 0
        if start is None:
            return False
        prompt.start = start
        if prompt.kept is not None:
            prompt.copied = prompt.kept.ranges
            prompt.kept.free(self.places)
            prompt.kept = None
        return True

    def _lift(self, prompt: PromptWork) -> None:
        """Remove a prefix from the pool; if its prompt still owes completions, it is placed and encoded again."""
        if prompt.prefix_length:
            assert prompt.start is not None
            self.places.give_back(prompt.start)
            self._needed -= prompt.prefix_length
        prompt.start, prompt.copied = None, ()

    # ---- what is kept

    def _keep(self, entry: Entry, written: int) -> KeptTurn:
        prompt = entry.prompt
        self.places.shrink(entry.tail_start, written)
        ranges = [(entry.tail_start, written)]
        if prompt.prefix_length:
            assert prompt.start is not None
            self.places.share(prompt.start)
            ranges.insert(0, (prompt.start, prompt.prefix_length))
        return KeptTurn(prompt.ids, tuple(ranges))

    def _take(self, length: int) -> int | None:
        """Allocate a range, giving up kept turns if necessary and if that can free enough; else None."""
        start = self.places.take(length)
        while start is None and self._needed + length <= self.places.size and self._give_up_one():
            start = self.places.take(length)
        if start is not None:
            self._needed += length
        return start

    def _give_up_one(self) -> bool:
        """Free a kept turn: the oldest that ended in this call, as it may never be continued; else the last needed."""
        if self.ended:
            turn = self.ended.pop(next(iter(self.ended)))
        else:
            prompt = next((prompt for prompt in reversed(self.waiting) if prompt.kept is not None), None)
            if prompt is None or prompt.kept is None:
                return False
            turn, prompt.kept = prompt.kept, None
        turn.free(self.places)
        return True
