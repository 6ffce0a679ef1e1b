"""Functions with which recipes transform the rows of a dataset (`dataset_map: rows.py:…`)."""

from typing import Any

REASONING = "Think about it inside <think> </think> and then give the answer in \\boxed{}."


def reasoned(row: dict[str, Any]) -> dict[str, Any]:
    """A conversation with instructions on how to answer appended to its last message.

    Example:
        reasoned({"prompt": [{"role": "user", "content": "2+2?"}]})["prompt"][0]["content"] == f"2+2?\\n{REASONING}"
    """
    *before, last = row["prompt"]
    return {"prompt": [*before, {**last, "content": f"{last['content']}\n{REASONING}"}]}


def visual_question(row: dict[str, Any]) -> dict[str, Any]:
    """A question about a picture as a conversation; the picture stays in the column `image`.

    Example:
        visual_question({"problem": "How many cubes?", "image": picture})["prompt"][0]["role"] == "user"
    """
    return reasoned({"prompt": [{"role": "user", "content": row["problem"]}]})
