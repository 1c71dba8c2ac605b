"""OpenEnv: the container of an environment's server, by its provider interface; and one that is restored."""

import json
import urllib.request

from openenv.core.containers.runtime.providers import ContainerProvider

from pagurus.integrations.openenv import PagurusContainerProvider

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += self.path == "/count"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(Handler.count).encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def said(url: str) -> str:
    with urllib.request.urlopen(f"{url}/count", timeout=30) as answer:
        return answer.read().decode()


provider: ContainerProvider = PagurusContainerProvider(command=["python3", "-c", SERVER])
url = provider.start_container("debian")
try:
    provider.wait_for_ready(url, timeout_s=120)
    result = {"said": [said(url), said(url)]}
    restored = PagurusContainerProvider(checkpoint=provider.box.checkpoint().id)
    other = restored.start_container("debian")
    try:
        restored.wait_for_ready(other, timeout_s=120)
        result["restored"] = said(other)
    finally:
        restored.stop_container()
finally:
    provider.stop_container()
print(json.dumps(result))
