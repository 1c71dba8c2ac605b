// Builds of images: those under way, those that are over, and what each said.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { BuildInfo } from "../api/schema";
import { complain, useLive } from "../state";
import { duration, moment, visible, visibleBlock } from "../text";
import { Chip } from "../ui/parts";

const INTERVAL = 2; // seconds
const MAX_SHOWN = 10_000; // lines

function Log({ id }: { id: string }) {
  const lines = useSignal<string[]>([]);
  useEffect(() => {
    const ending = new AbortController();
    let begin = 0;
    let timer = 0;
    const again = async (): Promise<void> => {
      try {
        const part = await api.buildLog(id, begin, { signal: ending.signal });
        begin = part.next ?? begin;
        if (part.lines?.length) lines.value = [...lines.value, ...part.lines].slice(-MAX_SHOWN);
        const more = Boolean(part.lines?.length);
        if (more || (part.build.state ?? "running") === "running") timer = window.setTimeout(again, more ? 0 : INTERVAL * 1000);
      } catch (error) {
        complain(error);
      }
    };
    void again();
    return () => {
      ending.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return (
    <pre class="log" data-testid="log" tabIndex={0}>
      {visibleBlock(lines.value.join("\n")) || <span class="dim">nothing yet</span>}
    </pre>
  );
}

function Row({ item, chosen, onChoose }: { item: BuildInfo; chosen: boolean; onChoose: () => void }) {
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td>
        <button class="link" aria-expanded={chosen} onClick={onChoose}>
          {visible(item.name)}
        </button>
      </td>
      <td>
        <Chip kind={item.state ?? "running"}>{item.state ?? "running"}</Chip>
        {item.error && <div class="dim">{visible(item.error)}</div>}
      </td>
      <td class="wide">{moment(item.started_at)}</td>
      <td class="number">{duration((item.ended_at ?? Date.now() / 1000) - item.started_at)}</td>
      <td class="number">
        {item.lines ?? 0}
        {item.cut && "+"} lines
      </td>
    </tr>
  );
}

export function Builds() {
  const live = useLive("builds", (signal) => api.builds({ signal }), INTERVAL);
  const chosen = useSignal<string | null>(null);
  const list = [...(live.value.value ?? [])].sort((one, other) => other.started_at - one.started_at);
  return (
    <>
      <h2>Builds</h2>
      {list.length === 0 && <p class="dim">None since this host remembers.</p>}
      <div class="scroll">
        <table data-testid="builds">
          <tbody>
            {list.map((item) => (
              <Row
                key={item.id}
                item={item}
                chosen={item.id === chosen.value}
                onChoose={() => (chosen.value = item.id === chosen.value ? null : item.id)}
              />
            ))}
          </tbody>
        </table>
      </div>
      {chosen.value && <Log key={chosen.value} id={chosen.value} />}
    </>
  );
}
