"""Multi-turn rollouts with tools and environments."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class ToolConfig:
    """How often tools may be called, and how long a call may take."""

    max_tool_calling_iterations: int | None = option(
        None, "Maximum rounds of tool calls in a completion; 0 allows none, None is unlimited."
    )
    tool_timeout: float | None = option(
        None,
        "Seconds that one call of a tool, or an environment's reset, may take before it counts as failed; None waits. "
        "The thread of a plain function cannot be killed: it keeps running, and its result is ignored.",
    )
    max_parallel_tools: int = option(
        32,
        "Completions whose tools run at the same time, on as many threads. With 1 and no tool_timeout, plain "
        "functions run one after another in the main thread.",
    )
