"""Text normalisation: one form for each digit, sign and LaTeX wrapper."""

import re
import unicodedata

__all__ = [
    "CJK",
    "JOINT",
    "WRAPPER",
    "close_joints",
    "join_thousands",
    "plain_text",
    "slashed",
    "tidy",
    "without_emphasis",
]

CJK = "\u3400-\u4dbf\u4e00-\u9fff"

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
# Single characters for fractions, circled and bracketed numbers, days, hours and months.
ONE_CHARACTER = "[¼-¾⅐-⅟↉①-⒛⓪㉑-㉟㊱-㊿㋀-㋋㍘-㍰㏠-㏾\U0001f100-\U0001f10a]"
# Spaces used inside numbers: thin, narrow and non-breaking.
THIN_SPACE = re.compile("(?<=[0-9])[\u00a0\u2007\u2009\u202f](?=[0-9]{3}(?![0-9]))")
CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-")  # the Unicode minus, and dashes used for it
    | dict.fromkeys("\u2044\u2215", "/")
    | dict.fromkeys("\x00\u200b\u200c\u200d\u200e\u200f\u2060\ufeff")  # invisible
)

# `\text{18}` and similar are replaced by their content. Inner braces are not matched, which keeps it linear.
WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|bm|boldsymbol|operatorname)"
    r"\s*\{([^{}]*)\}"
)
MATH_SIGNS = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$|\\(?:left|right|displaystyle|bf|rm)(?![A-Za-z])|(?<!\\)\\!")
DIGIT_SPACE = re.compile(r"(?<=[0-9])(?:(?<!\\)\\[,;: ]|~|\{,\}(?=[0-9]{3}))(?=[0-9])")
THOUSANDS = re.compile(r"(?<![0-9.,/^_])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9/]| [0-9/])")
SPACES = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s+")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°")
SIMPLE = r"\s*(-?[0-9]*\.?[0-9]+)\s*"
FRACTION = re.compile(rf"\\[dtc]?frac\s*(?:\{{{SIMPLE}\}}|([0-9]))\s*(?:\{{{SIMPLE}\}}|([0-9]))")

# Markdown's stars have no space inside, and are not between two operands: 4*2* and **4**2 have no emphasis.
EMPHASIS = re.compile(
    r"(?<![0-9A-Za-z*)\]}])(?<![0-9)\]}] )(?<![0-9][.,])(\*{1,3})(?=[^\s*])([^*\n]{1,300}?)(?<=\S)\1"
    r"(?![*0-9(\[{]|[.,][0-9]|\\(?![%$)\]]|text|mathrm|[,;: ]\\))"
)
HALF_EMPHASIS = re.compile(r"^\s*\*+\s*|(?<=[^\s*])\*{2,3}(?=\s+[^\s0-9(*]|[,.;:!?](?![0-9]))|\s?\*{2,3}\s*$")
# A power in program notation; nested brackets in the exponent, and towers of powers, are left alone.
PROGRAM_POWER = re.compile(
    r"(?<=[0-9A-Za-z)\]}]) ?\*\* ?(-?[0-9]+(?:\.[0-9]+)?|-?[A-Za-z]|\([^()*]*\))"
    r"(?![0-9A-Za-z(]|\.[0-9]| ?\*\*| ?[\^!])"
)
JOINT = "\0"  # marks where a sign was removed; `plain_text` removes all NULs beforehand


def plain_text(text: str) -> str:
    """Convert full-width forms, Unicode minus, superscripts and Chinese fractions to ASCII.

    Example:
        plain_text("x² ＝ １８，百分之４０") == "x^{2} = 18,40%"
    """
    # NFKC would join these to adjacent digits: 5² and 5₂ are not 52, and 3½ is not 31/2.
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: "^{" + found[0].translate(SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀-₉]+", lambda found: "_{" + unicodedata.normalize("NFKC", found[0]) + "}", text)
    text = re.sub(rf"(?<=\d)(?={ONE_CHARACTER})|(?<={ONE_CHARACTER})(?=\d|{ONE_CHARACTER})", " ", text)
    text = THIN_SPACE.sub(r"\\,", text)
    text = unicodedata.normalize("NFKC", text).translate(CHARACTERS)
    text = re.sub(r"(?![0-9])\d", lambda found: str(int(found[0])), text)
    if "分之" in text:
        text = re.sub(r"百分之\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)", r"\1%", text)
        text = re.sub(r"([0-9]{1,20})又(?=[0-9])", r"\1 ", text)
        text = re.sub(r"([0-9]{1,20})分之([0-9]{1,20})", r"\2/\1", text)
    text = re.sub("(?<![胜正抱])负 ?(?=[0-9])", "-", text)  # a minus in words; not the 负 of 胜负 (win or lose)
    return re.sub(r"([0-9]) ?又 ?(?=[0-9])", r"\1 ", text)


def tidy(text: str, *, unwrap: bool = True) -> str:
    """Remove math delimiters, sizes, emphasis and spacing. Adjacent numbers stay apart: only thousands are joined.

    Example:
        tidy(r"$**1\\,234**\\;\\text{cm}$") == "1234 cm"
        tidy(r"$1$$3$") == "1 3"
    """
    text = HALF_EMPHASIS.sub("", without_emphasis(text))
    text = PROGRAM_POWER.sub(lambda found: "^{" + found[1].strip("()") + "}", text)
    text = DIGIT_SPACE.sub(lambda found: "," if found[0] == "{,}" else " ", text)
    text = MATH_SIGNS.sub(JOINT, text)
    text = SPACES.sub(" ", text)
    text = DEGREES.sub(JOINT, text).replace("\\%", "%")
    text = close_joints(text)
    if unwrap:
        for _ in range(3):  # handles \textbf{\text{18}}; deeper nesting is not a plain answer
            text, found = WRAPPER.subn(r" \1 ", text)
            if not found:
                break
    text = re.sub(" +", " ", text).strip()
    return join_thousands(text).rstrip(".。,;: ")


def slashed(text: str) -> str:
    """Write fractions of plain numbers as `a/b`, separated from adjacent text by spaces.

    Example:
        slashed(r"15\\frac{39}{40}") == "15 39/40"
    """
    return re.sub(" +", " ", FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)).strip()


def without_emphasis(text: str) -> str:
    """Remove Markdown's stars, but not those that multiply: `**12**` becomes 12, and 1*2 stays."""
    return EMPHASIS.sub(r"\2", text) if "*" in text else text


def close_joints(text: str) -> str:
    """Remove the marks of removed signs, but leave a space between two numbers."""
    return re.sub(f"(?<=[0-9.]){JOINT}+(?=[0-9.])", " ", text).replace(JOINT, "")


def join_thousands(text: str) -> str:
    """Join digits in groups of three into one number, except before a fraction, where they form a mixed number.

    Example:
        join_thousands("1 234 000, 12 34, 5 100/7") == "1234000, 12 34, 5 100/7"
    """
    return THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
