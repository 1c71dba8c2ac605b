// How programs reach this daemon.

import { Copy } from "../ui/parts";

export function ConnectView() {
  const url = location.origin;
  return (
    <section>
      <h1>Connect</h1>
      <h2>E2B</h2>
      <p>Programs that use E2B's SDK run unchanged with three variables:</p>
      <Copy
        text={`export E2B_API_KEY=$(pagurus token create mine --e2b)\nexport E2B_API_URL=${url} E2B_SANDBOX_URL=${url}`}
      />
      <h2>Model Context Protocol</h2>
      <p>A model gets sandboxes as tools, on this host:</p>
      <Copy text="claude mcp add pagurus -- pagurus mcp" />
      <h2>Python</h2>
      <Copy
        text={`from sandbox.sync import Client\n\nwith Client("${url}", token="...") as host, host.create("debian") as sb:\n    print(sb.exec("uname -a").text)`}
      />
      <h2>Command line, elsewhere</h2>
      <Copy text={`pip install pagurus-client\nexport PAGURUS_HOST=${url} PAGURUS_TOKEN=...\npagurus ls`} />
    </section>
  );
}
