// One sandbox: what it is, and a tab for each way to look into it.

import type { ComponentChild } from "preact";
import { useMemo } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { ApiError } from "../api/client";
import * as api from "../api/calls";
import type { SandboxInfo } from "../api/schema";
import { attempt, isCluster, link, useLive } from "../state";
import { duration, visible } from "../text";
import { later } from "../ui/later";
import { Ask, Chip } from "../ui/parts";
import { Place } from "./cluster/Place";
import { ConversationTab } from "./Conversation";
import { FilesTab } from "./Files";
import { LimitsTab } from "./Limits";
import { NetworkTab } from "./Network";
import { ProcessesTab } from "./Processes";
import { TreeTab } from "./Tree";

const TerminalTab = later(() => import("./Terminal").then((loaded) => loaded.TerminalTab));

const TABS: [string, string, (info: SandboxInfo) => ComponentChild][] = [
  ["tree", "Checkpoints", (info) => <TreeTab info={info} />],
  ["terminal", "Terminal", (info) => <TerminalTab id={info.id} />],
  ["processes", "Processes", (info) => <ProcessesTab id={info.id} />],
  ["files", "Files", (info) => <FilesTab id={info.id} />],
  ["network", "Ports & network", (info) => <NetworkTab id={info.id} />],
  ["conversation", "Conversation", (info) => <ConversationTab id={info.id} />],
  ["limits", "Limits", (info) => <LimitsTab info={info} />],
];

function Head({ info, refresh }: { info: SandboxInfo; refresh: () => void }) {
  const remove = async (): Promise<void> => {
    if (await attempt(() => api.remove(info.id), "Removed.")) location.hash = link();
  };
  const kill = (): Promise<void> => attempt(() => api.kill(info.id), "Killed. A restore brings its processes back.").then(refresh);
  return (
    <div class="bar-of-tools">
      <h1>{visible(info.name ?? info.id)}</h1>
      {info.name && <span class="dim">{info.id}</span>}
      <Chip kind={info.state}>{info.state}</Chip>
      <span class="dim">
        {visible(info.image)} · {duration(Date.now() / 1000 - info.created_at)} · turn {info.turn ?? 0}
      </span>
      <span class="spacer" />
      {isCluster.value && <Place id={info.id} />}
      <Ask title="Kill all its processes?" act={kill}>
        Kill
      </Ask>
      <Ask title="Remove it with its checkpoints?" act={remove} danger>
        Remove
      </Ask>
    </div>
  );
}

export function SandboxView({ id, tab }: { id: string; tab: string }) {
  const gone = useSignal(false);
  useMemo(() => {
    if (TABS.every(([item]) => item !== tab) || tab === TABS[0]![0]) api.treeAhead(id);
  }, [id]);
  const live = useLive(
    id,
    async (signal) => {
      try {
        return await api.sandboxInfo(id, { signal });
      } catch (error) {
        gone.value = error instanceof ApiError && error.status === 404;
        throw error;
      }
    },
    2,
  );
  const info = live.value.value;
  if (gone.value) {
    return (
      <section>
        <p>{visible(live.error.value)}</p>
        <a href={link()}>All sandboxes</a>
      </section>
    );
  }
  if (!info) return <p class="wait">{live.error.value || "…"}</p>;
  const [name, , content] = TABS.find(([item]) => item === tab) ?? TABS[0]!;
  return (
    <section class="full">
      <Head info={info} refresh={live.refresh} />
      <nav class="tabs" aria-label="Parts of the sandbox">
        {TABS.map(([item, title]) => (
          <a key={item} href={link("s", id, item)} aria-current={item === name ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      <div class="tab">{content(info)}</div>
    </section>
  );
}
