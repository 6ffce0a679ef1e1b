"""Lines of a forecast: name, size, and how the size was computed."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Term:
    """One line: its name, its bytes, and the formula that gives them."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Phase:
    """A phase of a run, and everything that is allocated in it."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)


def product(name: str, *factors: tuple[float, str], over: int = 1) -> Term:
    """A term that is a product, divided among `over` processes.

    Example:
        product("weights", (1000, "weights"), (2, "B")) == Term("weights", 2000, "1,000 weights × 2 B")
    """
    size = 1.0
    for factor, _ in factors:
        size *= factor
    said = " × ".join(f"{plain(factor)} {unit}" for factor, unit in factors)
    return Term(name, int(size / over), said if over == 1 else f"{said} / {over} processes")


def plain(number: float) -> str:
    """Example: plain(1234567) == "1,234,567" and plain(0.5625) == "0.5625"."""
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"
