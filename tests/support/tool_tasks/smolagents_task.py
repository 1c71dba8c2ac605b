"""smolagents: an agent that writes code; it runs in a sandbox, and keeps its variables."""

import json
import os

from smolagents import CodeAgent, OpenAIServerModel, tool
from smolagents.utils import AgentError

from pagurus.integrations.smolagents import PagurusExecutor


@tool
def shells(count: int) -> str:
    """Name shells.

    Args:
        count: how many
    """
    return "shell " * count


executor = PagurusExecutor(timeout=20)
model = OpenAIServerModel("scripted", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = CodeAgent(tools=[shells], model=model, executor=executor, additional_authorized_imports=["*"])
result = {"answer": agent.run("count the shells")}
executor.run_code_raise_errors("kept = 1")
try:
    executor.run_code_raise_errors("kept = 2\nimport time\ntime.sleep(600)")
except AgentError as error:
    result["slow"] = "undone" in str(error)
result["kept"] = executor.run_code_raise_errors("kept").output
result["shell"] = executor.run_code_raise_errors("!echo hermit").logs
executor.cleanup()
print(json.dumps(result))
