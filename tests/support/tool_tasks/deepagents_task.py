"""deepagents: an agent whose model calls its tools; they run in a sandbox."""

import json
import os

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

from pagurus.integrations.deepagents import PagurusBackend

with PagurusBackend(workdir="/srv") as backend:
    model = ChatOpenAI(model="scripted", base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
    agent = create_deep_agent(model=model, backend=backend)
    said = agent.invoke({"messages": [{"role": "user", "content": "count the shells"}]})["messages"]
    results = [message.content for message in said if message.type == "tool"]
    (missing,) = backend.download_files(["/srv/nowhere"])
    (directory,) = backend.download_files(["/srv"])
    answer = backend.box.files.read("/srv/answer.txt").decode()
    print(json.dumps({"answer": answer, "results": results, "errors": [missing.error, directory.error]}))
