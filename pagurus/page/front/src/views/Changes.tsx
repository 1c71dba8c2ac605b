// What differs between two states of the files, and how each file differs, line by line.

import { structuredPatch } from "diff";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { Change, CheckpointInfo, FileVersion, SandboxInfo } from "../api/schema";
import { attempt } from "../state";
import { bytes, fromBase64, visible, visibleBlock } from "../text";
import { Chip } from "../ui/parts";

const MAX_CHANGES = 2000; // in the document
const MAX_LINES = 4000; // of one file
const EFFORT = { context: 3, maxEditLength: 5000, timeout: 1000 }; // edits, ms: a file may be made to take long

/** The text of a file; null where it is no text. */
function textOf(version: FileVersion): string | null {
  if (version.kind === "absent" || version.kind === "directory") return "";
  if (version.kind === "other") return null;
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(fromBase64(version.data), { stream: true });
  } catch {
    return null;
  }
}

function about(version: FileVersion): string {
  if (version.kind !== "file") return version.kind;
  return `${bytes(version.size ?? 0)} ${(version.mode ?? 0).toString(8).padStart(4, "0")}`;
}

function linesOf(before: FileVersion, after: FileVersion): string[] | null {
  const [old, now] = [textOf(before), textOf(after)];
  if (old === null || now === null) return null;
  const patch = structuredPatch("", "", old, now, undefined, undefined, EFFORT);
  return patch?.hunks.flatMap((hunk) => [`@@ -${hunk.oldStart} +${hunk.newStart} @@`, ...hunk.lines]) ?? null;
}

const KINDS: Record<string, string> = { "+": "plus", "-": "minus", "@": "dim" };

function Lines({ before, after }: { before: FileVersion; after: FileVersion }) {
  const shown = linesOf(before, after);
  const cut = [before, after].some((item) => item.kind === "file" && fromBase64(item.data).length < (item.size ?? 0));
  return (
    <div>
      <div class="dim">
        {about(before)} → {about(after)}
        {cut && ", of which the beginnings are compared"}
      </div>
      {shown === null && <div class="dim">It is no text, or too much of it differs.</div>}
      {shown && shown.length > 0 && (
        <pre class="patch" data-testid="patch">
          {shown.slice(0, MAX_LINES).map((line, number) => (
            <div key={number} class={KINDS[line[0] ?? ""] ?? ""}>
              {visibleBlock(line)}
            </div>
          ))}
          {shown.length > MAX_LINES && <div class="dim">… {shown.length} lines in all</div>}
        </pre>
      )}
    </div>
  );
}

interface States {
  sandbox: string;
  from: string;
  to: string | null; // null: now
}

function Item({ item, states }: { item: Change; states: States }) {
  const open = useSignal<{ before: FileVersion; after: FileVersion } | null>(null);
  const toggle = async (): Promise<void> => {
    if (open.value) open.value = null;
    else open.value = (await attempt(() => api.versions(states.sandbox, states.from, states.to, item.path))) ?? null;
  };
  return (
    <li>
      <Chip kind={item.kind}>{item.kind}</Chip>{" "}
      <button class="link mono" aria-expanded={open.value !== null} onClick={() => void toggle()}>
        {visible(item.path)}
      </button>
      {item.why && <div class="dim">{visible(item.why)}</div>}
      {open.value && <Lines before={open.value.before} after={open.value.after} />}
    </li>
  );
}

export function Changes({ info, checkpoint }: { info: SandboxInfo; checkpoint: CheckpointInfo }) {
  const result = useSignal<{ states: States; changes: Change[] } | null>(null);
  const load = async (from: string, to: string | null): Promise<void> => {
    const changes = await attempt(() => api.diff(info.id, from, to, to === null));
    result.value = changes ? { states: { sandbox: info.id, from, to }, changes } : null;
  };
  const { states, changes = [] } = result.value ?? {};
  const off = info.state !== "running" && info.state !== "dead";
  return (
    <div>
      <div class="line">
        <button type="button" onClick={() => void load(checkpoint.id, null)} disabled={off}>
          Diff to now
        </button>
        {checkpoint.parent && (
          <button type="button" onClick={() => void load(checkpoint.parent!, checkpoint.id)} disabled={off}>
            Diff to its parent
          </button>
        )}
      </div>
      {states && (
        <ul class="changes" data-testid="changes">
          {changes.slice(0, MAX_CHANGES).map((item) => (
            <Item key={`${states.from} ${states.to} ${item.path}`} item={item} states={states} />
          ))}
          {changes.length === 0 && <li class="dim">The files are equal.</li>}
          {changes.length > MAX_CHANGES && <li class="dim">… {changes.length} in all</li>}
        </ul>
      )}
    </div>
  );
}
