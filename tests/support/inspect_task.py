"""A task of Inspect whose solver has a shell in a sandbox."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import sandbox


@scorer(metrics=[accuracy()])
def repaired():
    async def score(state, target):
        result = await sandbox().exec(["cat", "answer.txt"])
        return Score(value=float(result.stdout.strip() == target.text), explanation=result.stdout + result.stderr)

    return score


@task
def shells():
    samples = [
        Sample(input="count them", target="42", files={"shells.txt": "x\n" * 42}),
        Sample(input="count them", target="7", files={"shells.txt": "x\n" * 7}),
    ]
    return Task(
        dataset=samples,
        solver=[use_tools([bash(timeout=30)]), generate()],
        scorer=repaired(),
        sandbox=("pagurus", "compose.yaml"),
    )
