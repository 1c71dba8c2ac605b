// The frame around every view: where one can go, who is logged in, what failed last.

import type { ComponentChild } from "preact";
import { dismiss, hasDaemon, isAdmin, isCluster, leave, link, login, mayAct, notices, ready, route, seesOwn } from "./state";
import { visible } from "./text";
import { later } from "./ui/later";
import { HostsView } from "./views/cluster/Hosts";
import { JobsView } from "./views/cluster/Jobs";
import { ConnectView } from "./views/Connect";
import { HostView } from "./views/Host";
import { ImagesView } from "./views/Images";
import { LoginView } from "./views/Login";
import { SandboxView } from "./views/Sandbox";
import { SandboxesView } from "./views/Sandboxes";
import { TokensView } from "./views/Tokens";

const RunView = later(() => import("./views/run/Run").then((loaded) => loaded.RunView));

const PLACES: [string, string, () => boolean][] = [
  ["", "Sandboxes", () => seesOwn.value],
  ["hosts", "Hosts", () => isCluster.value],
  ["jobs", "Jobs", () => isCluster.value && seesOwn.value],
  ["images", "Images", () => seesOwn.value],
  ["host", "Host", () => hasDaemon.value && !isCluster.value],
  ["tokens", "Tokens", () => isAdmin.value],
  ["run", "Run", () => Boolean(login.value?.run)],
  ["connect", "Connect", () => hasDaemon.value],
];

/** Where whoever names no place is: at the first one that there is. */
function firstPlace(): string {
  return PLACES.find(([, , shown]) => shown())?.[0] ?? "";
}

function view(): ComponentChild {
  const [first = "", item = "", tab = ""] = route.value;
  const name = hasDaemon.value ? first || firstPlace() : "run";
  switch (name) {
    case "s":
      return <SandboxView key={item} id={item} tab={tab} />;
    case "hosts":
      return <HostsView />;
    case "jobs":
      return <JobsView id={item} />;
    case "images":
      return <ImagesView />;
    case "host":
      return <HostView />;
    case "tokens":
      return <TokensView />;
    case "run":
      return <RunView names={route.value.slice(1)} />;
    case "connect":
      return <ConnectView />;
    default:
      return <SandboxesView />;
  }
}

function Notices() {
  return (
    <div class="notices" role="status" aria-live="polite">
      {notices.value.map((item) => (
        <div key={item.id} class={item.bad ? "notice bad" : "notice"}>
          <div>
            <div>{visible(item.text)}</div>
            {item.hint && <div class="dim">{visible(item.hint)}</div>}
          </div>
          <button class="plain" aria-label="Dismiss" onClick={() => dismiss(item.id)}>
            ×
          </button>
        </div>
      ))}
    </div>
  );
}

function Frame({ children }: { children: ComponentChild }) {
  const here = route.value[0] === "s" ? "" : (route.value[0] ?? "");
  const who = login.value;
  return (
    <>
      <header class="top">
        <a class="brand" href={link()}>
          Pagurus
        </a>
        <nav aria-label="Views">
          {PLACES.filter(([, , shown]) => shown()).map(([name, title]) => (
            <a key={name} href={link(name)} aria-current={name === here ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <span class="spacer" />
        {!mayAct.value && hasDaemon.value && <span class="chip" title="this token may read and nothing else">read-only</span>}
        {who?.token ? (
          <button class="plain" onClick={() => void leave()}>
            Log out
          </button>
        ) : null}
      </header>
      <main>{children}</main>
    </>
  );
}

export function App() {
  return (
    <>
      {!ready.value ? <p class="wait">…</p> : login.value ? <Frame>{view()}</Frame> : <LoginView />}
      <Notices />
    </>
  );
}
