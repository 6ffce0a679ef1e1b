"""Characters: one way to write each digit, sign and LaTeX wrapper."""

import re
import unicodedata

__all__ = ["CJK", "plain_text", "tidy"]

CJK = "\u3400-\u4dbf\u4e00-\u9fff"

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2012\u2013\u2014\ufe63\uff0d", "-")  # the Unicode minus and the dashes used for it
    | dict.fromkeys("\u2044\u2215", "/")
    | dict.fromkeys("\x00\u200b\u200c\u200d\u200e\u200f\u2060\ufeff")  # invisible
)

# `\text{18}` and the like are read as what they wrap. Braces inside end the search, which keeps it linear.
WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|bm|boldsymbol|operatorname)"
    r"\s*\{([^{}]*)\}"
)
MATH_SIGNS = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$|\*\*|\\(?:left|right|displaystyle|bf|rm)(?![A-Za-z])|(?<!\\)\\!")
DIGIT_SPACE = re.compile(r"(?<=[0-9])(?:(?<!\\)\\[,;: ]|~|\{,\}(?=[0-9]{3}))(?=[0-9])")
SPACES = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s+")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°")
SIMPLE = r"\s*(-?[0-9]*\.?[0-9]+)\s*"
FRACTION = re.compile(rf"\\[dtc]?frac\s*(?:\{{{SIMPLE}\}}|([0-9]))\s*(?:\{{{SIMPLE}\}}|([0-9]))")


def plain_text(text: str) -> str:
    """Full-width forms, Unicode minus, superscripts and Chinese fractions in ASCII.

    Example:
        plain_text("x² ＝ １８，百分之４０") == "x^{2} = 18,40%"
    """
    # Compatibility forms would glue these to the digits before them: 5² is not 52, and 3½ is not 31/2.
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: "^{" + found[0].translate(SUPERSCRIPTS) + "}", text)
    text = re.sub("([0-9])([¼-¾⅐-⅞])", r"\1 \2", text)
    text = unicodedata.normalize("NFKC", text).translate(CHARACTERS)
    text = re.sub(r"(?![0-9])\d", lambda found: str(int(found[0])), text)
    if "分之" in text:
        text = re.sub(r"百分之\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)", r"\1%", text)
        text = re.sub(r"([0-9]{1,20})又(?=[0-9])", r"\1 ", text)
        text = re.sub(r"([0-9]{1,20})分之([0-9]{1,20})", r"\2/\1", text)
    return re.sub(r"([0-9])又(?=[0-9])", r"\1 ", text)


def tidy(text: str, *, unwrap: bool = True) -> str:
    """A text without math signs, sizes and spacing; fractions of plain numbers as `a/b`.

    Example:
        tidy(r"$\\dfrac{1}{2}\\,\\text{cm}$") == "1/2 cm"
    """
    text = DIGIT_SPACE.sub(lambda found: "" if found[0] != "~" else " ", text)
    text = MATH_SIGNS.sub("", text)
    text = SPACES.sub(" ", text)
    text = DEGREES.sub("", text).replace("\\%", "%")
    if unwrap:
        for _ in range(3):  # \textbf{\text{18}} is seen; deeper nesting is no plain answer
            text, found = WRAPPER.subn(r" \1 ", text)
            if not found:
                break
        text = FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text)
    text = re.sub(" +", " ", text).strip()
    return text.rstrip(".。,;: ")
