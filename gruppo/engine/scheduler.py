"""Which completions run when. Plain Python: it counts places and rows and knows no tensors.

    waiting ──admit──► live ──finish──► done
       ▲ one entry per distinct prompt, with the completions it still owes

A completion is admitted only with its whole tail reserved, so a batch that runs never lacks memory. When it ends, its
tail is free at once; the prompt's prefix is free when the last completion of the prompt has ended.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gruppo.engine.kv import RangeAllocator


@dataclass
class PromptWork:
    """A distinct prompt and the completions it owes. All but its last token are encoded once, as a shared prefix."""

    ids: tuple[int, ...]
    tail_tokens: int  # places that one completion needs, at most: one for each token that is fed to the model
    owed: deque[int] = field(default_factory=deque)  # completions not admitted yet, by number
    start: int | None = None  # of the prefix in the pool
    live: int = 0

    @property
    def prefix_length(self) -> int:
        return len(self.ids) - 1


@dataclass(frozen=True)
class Entry:
    """An admitted completion: its number, its prompt, and where its tail begins."""

    completion: int
    prompt: PromptWork
    tail_start: int


@dataclass(frozen=True)
class Admission:
    """What enters now: prompts whose prefix must be encoded first, and completions."""

    prompts: list[PromptWork]
    entries: list[Entry]


class Scheduler:
    """Admits waiting completions in order, as places and rows allow."""

    def __init__(self, prompts: Iterable[PromptWork], places: RangeAllocator, rows: int):
        self.waiting = deque(prompt for prompt in prompts if prompt.owed)
        largest = max((prompt.prefix_length + prompt.tail_tokens for prompt in self.waiting), default=0)
        if largest > places.size:
            raise ValueError(f"A prompt and one completion need {largest} places, but there are {places.size}.")
        self.places = places
        self.rows = rows
        self.live: dict[int, Entry] = {}
        # A new prompt costs a forward pass that the others wait for: let some rows come free first.
        self._enough_rows = max(rows // 8, 1)

    @property
    def finished(self) -> bool:
        return not self.live and not self.waiting

    def admit(self) -> Admission:
        """Take in what fits. Something always does when nothing is live.

        The largest request fits an empty pool. A prefix that lies in its middle, with too little room on either side,
        is placed anew.
        """
        prompts: list[PromptWork] = []
        entries: list[Entry] = []
        worth_a_pass = not self.live or self.rows - len(self.live) >= self._enough_rows
        while self.waiting and len(self.live) < self.rows:
            prompt = self.waiting[0]
            if prompt.start is None:
                start = self.places.take(prompt.prefix_length) if worth_a_pass and prompt.prefix_length else None
                if start is None and (prompt.prefix_length or not worth_a_pass):
                    break
                prompt.start = start or 0
                prompts.append(prompt)
            tail_start = self.places.take(prompt.tail_tokens)
            if tail_start is None and not self.live and prompt not in prompts:
                self._lift(prompt)
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

    def finish(self, completion: int) -> None:
        """A completion has ended: free its tail, and its prompt if it was the last one."""
        entry = self.live.pop(completion)
        self.places.give_back(entry.tail_start)
        entry.prompt.live -= 1
        if not entry.prompt.live and not entry.prompt.owed:
            self._lift(entry.prompt)

    def _lift(self, prompt: PromptWork) -> None:
        """Take a prefix out of the pool; if its prompt still owes completions, it is placed and encoded again."""
        if prompt.prefix_length:
            assert prompt.start is not None
            self.places.give_back(prompt.start)
        prompt.start = None
