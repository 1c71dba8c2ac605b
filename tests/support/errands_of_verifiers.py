"""Environments of several turns by the classes of verifiers before 0.4, as a user's files have them. Not a test.

`STATEFUL` keeps a store of its own per episode and hands it to its tools; `GUESSED` answers each guess.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from rollout.environments.verifiers_classic import classic_environment, tool_call

ITEMS = ("lamp", "rope", "bell")


def poll(shelf: int, store: dict[str, int]) -> str:
    """What lies on a shelf.

    Args:
        shelf: its number
    """
    return ", ".join(item for item, at in store.items() if at == shelf) or "nothing"


def move(item: str, shelf: int, store: dict[str, int]) -> str:
    """Put an item on a shelf.

    Args:
        item: its name
        shelf: number of the shelf
    """
    if item not in store:
        raise ValueError(f"there is no {item}")
    store[item] = shelf
    return f"{item} lies on {shelf}"


class Stockroom(vf.StatefulToolEnv):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_tool(poll, args_to_skip=["store"])
        self.add_tool(move, args_to_skip=["store"])

    async def setup_state(self, state: vf.State, **_: Any) -> vf.State:
        state["store"] = {item: number for number, item in enumerate(ITEMS)}
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: vf.State, **_: Any
    ) -> dict[str, Any]:
        return {**tool_args, "store": state["store"]}


def brought(state: vf.State, answer: str) -> float:
    return float(state["store"][answer] == 9)


class HigherLower(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: vf.State, **_: Any) -> Any:
        said, target = str(messages[-1].content).strip(), int(state["answer"])
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return []
        hint = "say a number" if not said.isdigit() else "higher" if int(said) < target else "lower"
        return [vf.UserMessage(content=hint)]


def guessed(state: vf.State) -> float:
    return float(state.get("final_env_response") is not None)


STATEFUL = classic_environment(
    Stockroom(
        dataset=Dataset.from_list([{"question": f"Bring the {item} to shelf 9.", "answer": item} for item in ITEMS]),
        system_prompt="You mind a stockroom.",
        rubric=vf.Rubric(funcs=[brought]),
        max_turns=5,
    ),
    existing=lambda row: [tool_call("look", shelf=0), tool_call("move", item=row["answer"], shelf=9), "done"],
)
GUESSED = classic_environment(
    HigherLower(
        dataset=Dataset.from_list([{"question": "A number from 0 to 9?", "answer": str(n)} for n in (3, 7)]),
        rubric=vf.Rubric(funcs=[guessed]),
        max_turns=4,
    ),
    existing=lambda row: ["5", row["answer"]],
)
