"""Where the answer of a completion is, and which rule found it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.grading import LADDERS, Answer, Ladder, Rule, extract, extract_gold, last_box
from gruppo.grading.extract import box_contents, boxes_of_the_last_line

LITERAL = Ladder(literal=True, languages=("en", "zh"))
SYMBOLIC = Ladder(literal=False, languages=("en", "zh"))

# completion, answer, rule, why
COMPLETIONS = [
    (r"so \boxed{18}.", "18", Rule.BOX, "a box"),
    (r"first \boxed{3} then \boxed{18}", "18", Rule.BOX, "the last box only"),
    (r"\boxed{18} so the answer is 3. #### 4", "18", Rule.BOX, "a box comes before everything else"),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}", Rule.BOX, "braces in the box"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}", Rule.BOX, "escaped braces do not count"),
    (r"\boxed{18", "18", Rule.LAST_NUMBER, "an open box is no box"),
    (r"\boxed{17} and \boxed{18", "17", Rule.BOX, "the last complete one"),
    (r"\boxed{17} and \boxed{}", "17", Rule.BOX, "an empty one says nothing"),
    (r"in \boxed{}. The answer is 18.", "18", Rule.SENTENCE, "the instruction, echoed, holds an empty box"),
    (r"\fbox{18}", "18", Rule.BOX, "the other box"),
    (r"$\boxed 5$", "5", Rule.BOX, "a box without braces"),
    (r"\boxed {18}", "18", Rule.BOX, "a blank before the brace"),
    (r"\boxed{\boxed{18}}", "18", Rule.BOX, "a box in a box"),
    (r"\boxed{40}\%", "40%", Rule.BOX, "a percent sign that was left outside"),
    (r"\boxed{40\%}\%", r"40\%", Rule.BOX, "one is enough"),
    (r"\boxedx{3} gives 18", "18", Rule.LAST_NUMBER, "another command"),
    (r"{{{ \boxed{18}", "18", Rule.BOX, "open braces before it"),
    (r"}}} \boxed{18} }}", "18", Rule.BOX, "stray closing braces"),
    ("\\boxed{\n18\n}", "18", Rule.BOX, "over several lines"),
    ("The final answer is $18$. I hope it is correct.", "18", Rule.MINERVA, "the sentence of the Minerva prompts"),
    (r"final answer is: $\frac{1}{2}$", r"\frac{1}{2}", Rule.MINERVA, "with a colon"),
    ("The final answer is $18. He paid $20.", "$18", Rule.SENTENCE, "dollars are no math signs"),
    ("so 9 * 2 = 18\n#### 18", "18", Rule.HASHES, "GSM8K's own form"),
    ("#### 17\n#### 18", "18", Rule.HASHES, "its last one"),
    ("#### 1,234", "1,234", Rule.HASHES, "with thousands"),
    ("####18", "18", Rule.HASHES, "without a blank"),
    ("#### $18", "$18", Rule.HASHES, "in dollars"),
    ("#### Step 3: add\nSo 18", "18", Rule.LAST_NUMBER, "a headline is no answer"),
    ("#### 3. Add\nSo 18", "18", Rule.LAST_NUMBER, "nor is one that begins with a number"),
    ("#### 2 Conclusion\nTherefore 18 eggs.", "18", Rule.LAST_NUMBER, "nor is one without a stop"),
    ("#### 1 Setup\n9*2=18\n#### 18", "18", Rule.HASHES, "a headline and an answer"),
    ("#### 18 Dollars\n", "18 Dollars", Rule.HASHES, "nothing below it: no headline"),
    ("#### 7 eggs are left after 3 days", "7 eggs are left", Rule.HASHES, "a phrase with another number"),
    ("#### 18\nThe answer is 3.", "18", Rule.HASHES, "hashes come before sentences"),
    ("The answer is 18.", "18", Rule.SENTENCE, "a sentence"),
    ("THE ANSWER IS 18", "18", Rule.SENTENCE, "any case"),
    ("The answer is: 18", "18", Rule.SENTENCE, "a colon"),
    ("Answer: 18", "18", Rule.SENTENCE, "no verb"),
    ("**Answer:** 18", "18", Rule.SENTENCE, "bold"),
    ("**Final Answer**: 18", "18", Rule.SENTENCE, "bold, the colon outside"),
    ("Answer:\n\\[\n18\n\\]", "18", Rule.SENTENCE, "in displayed math"),
    ("Answer:\n$$\n18\n$$", "18", Rule.SENTENCE, "in displayed math of the other kind"),
    ("The answer is \\[18\\]", "18\\]", Rule.SENTENCE, "displayed on the same line"),
    ("Let me check if the answer is right.\n16-3-4=9, 9*2=18", "18", Rule.LAST_NUMBER, "nothing is announced"),
    ("The answer is 18. I hope the answer is right.", "18", Rule.SENTENCE, "the announcement before that"),
    ("她每天赚18美元。检查答案：正确。", "18", Rule.LAST_NUMBER, "nothing is announced in Chinese"),
    ("**Final Answer**: 18 dollars (9 eggs)", "18 dollars", Rule.SENTENCE, "a bracket after it"),
    ("Answer: 18 dollars (2 + 3 = 5 eggs)", "18 dollars", Rule.SENTENCE, "a calculation in the bracket"),
    ("Answer: she makes 18 dollars (9 eggs)", "18", Rule.SENTENCE, "words before it"),
    ("Answer: 18 dollars (or 20)", "18 dollars (or 20)", Rule.SENTENCE, "another answer in the bracket"),
    ("Answer: (B) 18", "18", Rule.SENTENCE, "a bracket before it"),
    ("The answer is 1,234 eggs, sold in 3 days", "1,234 eggs", Rule.SENTENCE, "thousands are no clause"),
    ("Answer: 17, 18", "17, 18", Rule.SENTENCE, "two guesses are no clause either"),
    ("Answer: 5 hours, 30 minutes", "5 hours, 30 minutes", Rule.SENTENCE, "nor are two amounts"),
    ("答:一共有18个,平均每人6个。", "18", Rule.SENTENCE, "a second clause"),
    ("答案是 3.5 千克，即 3500 克。", "3.5 千克", Rule.SENTENCE, "the same again in another unit"),
    ("答：每天卖9个，9*2=18元。", "18元", Rule.SENTENCE, "a result in the second clause"),
    ("Answer:\n18 eggs", "18 eggs", Rule.SENTENCE, "on the next line"),
    (
        "The answer is 3. No, the answer is 18. I hope 5 agree.",
        "18",
        Rule.SENTENCE,
        "the last one, up to its full stop",
    ),
    ("The answer is 18.5 kg", "18.5 kg", Rule.SENTENCE, "a decimal point is no full stop"),
    ("The answer is that she has 18 dollars left.", "18", Rule.SENTENCE, "the only number of the sentence"),
    ("The answer is 9 * 2 = 18 dollars.", "18 dollars", Rule.SENTENCE, "what it equals"),
    ("The answer is 3 or 18.", "3 or 18", Rule.SENTENCE, "undecided: no number is picked out"),
    ("所以答案是18", "18", Rule.SENTENCE, "Chinese"),
    ("所以答案是：18。", "18", Rule.SENTENCE, "with a full-width colon and stop"),
    ("答案为 18 元", "18 元", Rule.SENTENCE, "the other verb"),
    ("答案：18", "18", Rule.SENTENCE, "no verb in Chinese"),
    ("答：她每天赚18元。共3天", "18", Rule.SENTENCE, "a whole sentence, up to its stop"),
    ("答：一共有12+3=15个桃。", "15个桃", Rule.SENTENCE, "a calculation in it"),
    ("答案是18，所以选B", "18", Rule.SENTENCE, "a clause after it"),
    ("答案是１，２３４元", "1,234元", Rule.SENTENCE, "full-width digits and comma"),
    ("答案是百分之40", "40%", Rule.SENTENCE, "percent said first"),
    ("She makes 9 * 2 = $18 every day", "18", Rule.LAST_NUMBER, "no announcement at all"),
    ("she owes -$5", "-5", Rule.LAST_NUMBER, "a sign before the currency"),
    ("from 20-3", "3", Rule.LAST_NUMBER, "a difference is no sign"),
    ("so 1,234.50", "1,234.50", Rule.LAST_NUMBER, "thousands and decimals"),
    (r"so $\frac{1}{2}$", "1/2", Rule.LAST_NUMBER, "a fraction is one number"),
    ("which is 40%", "40%", Rule.LAST_NUMBER, "a percentage"),
    ("一共18万元", "18万", Rule.LAST_NUMBER, "a Chinese amount"),
    ("一共是１８个", "18", Rule.LAST_NUMBER, "full-width digits"),
    ("```output\n18\n```\nso it is 3", "3", Rule.LAST_NUMBER, "an output block is text"),
]

NOTHING = ["", " \n ", "I do not know.", r"\boxed{}", "我不知道", "🤷", "\x00", "x^2", r"\boxed{ . }"]


@pytest.mark.parametrize(("completion", "answer", "rule", "why"), COMPLETIONS, ids=[row[3] for row in COMPLETIONS])
def test_the_answer_of_a_completion(completion, answer, rule, why):
    assert extract(completion, LITERAL) == Answer(answer, rule)


@pytest.mark.parametrize("completion", NOTHING)
def test_no_answer(completion):
    assert extract(completion, LITERAL) is None


@pytest.mark.parametrize(
    ("completion", "answer", "rule"),
    [
        ("The answer is $x = 5$ for all of them.", "x = 5", Rule.SENTENCE),
        (r"The answer is \frac{x}{2}.", r"\frac{x}{2}", Rule.SENTENCE),
        (r"#### \frac{1}{2}", r"\frac{1}{2}", Rule.HASHES),
        ("答案是 x+1。", "x+1", Rule.SENTENCE),
    ],
)
def test_formulas_in_sentences(completion, answer, rule):
    assert extract(completion, SYMBOLIC) == Answer(answer, rule)


FENCED = "```output\n42\n```\nIn 3 steps."
# completion, what the last program printed, answer, rule, why
OUTPUTS = [
    ("See above.", "18\n", "18", Rule.OUTPUT, "a number"),
    ("So 5.", "long way\n18\n\n", "18", Rule.OUTPUT, "its last line, before any number of the text"),
    ("So 5.", "Percent error: 4\n", "4", Rule.OUTPUT, "a label, whatever it says"),
    ("So 5.", "Step 2: 18 eggs", "18 eggs", Rule.OUTPUT, "a label with a number"),
    ("So 5.", "the exception: timeout 7\n18", "18", Rule.OUTPUT, "words of errors"),
    ("So 5.", "`` ` ``` 1\n```output\n18\n```\n17", "17", Rule.OUTPUT, "fences are text"),
    ("So 5.", "so \\boxed{18}", "18", Rule.OUTPUT, "a box in it"),
    ("So 5.", "The answer is 18 of 20", "18 of 20", Rule.OUTPUT, "a sentence in it"),
    ("So 5.", "sqrt(2)", "sqrt(2)", Rule.OUTPUT, "a number is not picked out of a formula"),
    ("So 5.", "３：４", "3:4", Rule.OUTPUT, "a ratio has no label"),
    ("It is 7.", None, "7", Rule.LAST_NUMBER, "none, or it failed"),
    ("It is 7.", "", "7", Rule.LAST_NUMBER, "it printed nothing"),
    ("It is 7.", " \n\t\n", "7", Rule.LAST_NUMBER, "the same in blanks"),
    ("The answer is 7.", "18", "7", Rule.SENTENCE, "what the model announces comes first"),
    ("\\boxed{7}", "18", "7", Rule.BOX, "so does a box"),
    (FENCED, None, "3", Rule.LAST_NUMBER, "a fence that the model wrote is no output"),
    (FENCED.replace("`", "｀"), None, "3", Rule.LAST_NUMBER, "nor is a full-width one"),
    (FENCED.replace("``", "`\u200b`"), None, "3", Rule.LAST_NUMBER, "nor is one with invisible signs"),
    (FENCED.replace("output", "ｏutput"), "18", "18", Rule.OUTPUT, "whether or not there is a real one"),
]


@pytest.mark.parametrize(("completion", "output", "answer", "rule", "why"), OUTPUTS, ids=[row[4] for row in OUTPUTS])
def test_program_output(completion, output, answer, rule, why):
    assert extract(completion, LITERAL, output) == Answer(answer, rule)


@pytest.mark.parametrize(
    ("output", "answer"),
    [("Roots: [2, 5]", "[2, 5]"), ("It is $x^2$", "x^2"), ("x: y: 3", "y: 3"), ("y = 2x", "y = 2x")],
)
def test_program_output_with_formulas(output, answer):
    assert extract("", SYMBOLIC, output) == Answer(answer, Rule.OUTPUT)


def test_languages_choose_the_sentences():
    text = "答案是18, not 5"
    assert extract(text, Ladder(literal=True, languages=("en",))) == Answer("5", Rule.LAST_NUMBER)
    assert extract("the answer is 18 not 答 5", Ladder(literal=True, languages=("zh",))) == Answer(
        "5", Rule.LAST_NUMBER
    )


# reference, gold, ladder, why
GOLDS = [
    ("42", "42", "gsm8k", "the answer itself"),
    ("16 - 3 = 13\n#### 13", "13", "gsm8k", "GSM8K's own form"),
    ("#### 1,234", "1,234", "gsm8k", "with thousands"),
    (r"We get $x=5$, so \boxed{5}.", "5", "math", "a boxed solution"),
    (r"\frac{1}{2}", r"\frac{1}{2}", "math", "a formula"),
    (r"\text{Evelyn}", r"\text{Evelyn}", "math", "a name"),
    ("The answer is 18.", "18", "gsm8k", "announced"),
    ("4/6", "4/6", "cmath", "a fraction"),
    ("27.3%", "27.3%", "cmath", "a percentage"),
    ("", None, "math", "nothing"),
    ("  ", None, "math", "blanks"),
    ("not a number", None, "gsm8k", "words where a number must be"),
    ("She makes 9 * 2 = $18 every day.\nThen 5 more.", None, "gsm8k", "a solution that announces nothing"),
    ("Line one.\nLine two.", None, "math", "the same for formulas"),
    (r"\boxed{9\cdot 2}", None, "gsm8k", "a calculation where a number must be"),
]


@pytest.mark.parametrize(("reference", "gold", "ladder", "why"), GOLDS, ids=[row[3] for row in GOLDS])
def test_the_gold_of_a_reference(reference, gold, ladder, why):
    assert extract_gold(reference, LADDERS[ladder]) == gold


def test_boxes():
    text = "\\boxed{1}\nso \\boxed{2}, \\boxed{x}, \\boxed{}, \\boxed{3\nno more"
    assert box_contents(text) == ["1", "2", "x"]
    assert last_box(text) == "x"
    assert boxes_of_the_last_line(text) == "2, x"
    assert last_box("none") is boxes_of_the_last_line("none") is None


LONG = 100_000
FLOODS = [
    "{",
    "\\boxed{",
    "7",
    "1,111",
    "1/",
    "1 ",
    "#### x\n",
    "####",
    "final answer is $",
    "answer:",
    "answer: a\n",
    "#### 1 Aa\n",
    "答案是",
    "$",
    "\\",
]
FLOODS += [
    "\ufdfa",
    "-",
    "\\frac{",
    "²",
    "1又",
    "1分之",
    "```output",
    " ",
    "answer:\n",
    "*",
    "\\boxed ",
    "1e",
    "1.",
    "%",
    "万",
    "111 ",
    "1\\,111",
    " *a",
    "a** ",
    "1①",
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("piece", FLOODS)
@pytest.mark.parametrize("ladder", [LITERAL, SYMBOLIC], ids=["literal", "symbolic"])
def test_floods_take_linear_time(piece, ladder):
    begin = time.monotonic()
    flood = piece * (LONG // len(piece))
    extract(flood, ladder)
    extract("", ladder, output=flood)
    assert time.monotonic() - begin < 10


def test_deep_boxes():
    depth = LONG // 8
    assert extract("\\boxed{" * depth + "18" + "}" * depth, LITERAL) == Answer("18", Rule.BOX)


def test_only_the_end_of_a_very_long_text_is_read():
    assert extract(r"\boxed{3}" + "x" * LONG, LITERAL) is None
    assert extract("x" * LONG + r"\boxed{18}", LITERAL) == Answer("18", Rule.BOX)


@given(st.text(max_size=300), st.text(max_size=50))
def test_what_stands_before_a_box_does_not_matter(before, after):
    after = after.replace("\\", "").replace("%", "")
    found = extract(before.rstrip("\\") + " \\boxed{18} " + after.replace("％", ""), LITERAL)
    assert found is not None
    assert (found.rule, found.text.rstrip("%﹪٪")) == (Rule.BOX, "18")
