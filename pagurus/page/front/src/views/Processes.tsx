// Background processes of the sandbox's present state, and what they print.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import { lines } from "../api/client";
import type { LogChunk, ProcessInfo } from "../api/schema";
import { attempt, complain, mayAct, useLive } from "../state";
import { decoded, moment, visible, visibleBlock } from "../text";
import { Act, Chip } from "../ui/parts";

const MAX_SHOWN = 200_000; // characters of a log

function Log({ id, process }: { id: string; process: string }) {
  const text = useSignal("");
  useEffect(() => {
    const ending = new AbortController();
    text.value = "";
    const follow = async (): Promise<void> => {
      const path = `/v1/sandboxes/${encodeURIComponent(id)}/processes/${encodeURIComponent(process)}/follow`;
      for await (const chunk of lines<LogChunk>("GET", path, { signal: ending.signal })) {
        text.value = (text.value + decoded(chunk.data)).slice(-MAX_SHOWN);
      }
    };
    follow().catch(complain);
    return () => ending.abort();
  }, [id, process]);
  return (
    <pre class="log" data-testid="log" tabIndex={0}>
      {visibleBlock(text.value) || <span class="dim">nothing yet</span>}
    </pre>
  );
}

function Row({ item, chosen, onChoose, onChange, id }: {
  item: ProcessInfo;
  chosen: boolean;
  onChoose: () => void;
  onChange: () => void;
  id: string;
}) {
  const act = async (work: () => Promise<unknown>): Promise<void> => {
    await attempt(work);
    onChange();
  };
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td>
        <button class="link" onClick={onChoose}>
          {visible(item.command)}
        </button>
      </td>
      <td>{item.kind}</td>
      <td>
        <Chip kind={item.state}>{item.state}</Chip> {item.exit_code ?? ""}
      </td>
      <td>{item.pid}</td>
      <td class="wide">{moment(item.started_at)}</td>
      <td class="buttons">
        {item.state === "running" && (
          <>
            <Act onClick={() => void act(() => api.signalProcess(id, item.id, 15))}>TERM</Act>
            <Act onClick={() => void act(() => api.signalProcess(id, item.id, 9))}>KILL</Act>
          </>
        )}
        <Act onClick={() => void act(() => api.removeProcess(id, item.id))}>Remove</Act>
      </td>
    </tr>
  );
}

export function ProcessesTab({ id }: { id: string }) {
  const live = useLive(`${id}/processes`, (signal) => api.processes(id, { signal }), 2);
  const chosen = useSignal<string | null>(null);
  const command = useSignal("");
  const start = async (event: Event): Promise<void> => {
    event.preventDefault();
    const made = await attempt(() => api.startProcess(id, command.value));
    if (made) chosen.value = made.id;
    command.value = "";
    live.refresh();
  };
  const list = live.value.value ?? [];
  return (
    <div class="column">
      {mayAct.value && (
        <form class="bar-of-tools" onSubmit={(event) => void start(event)}>
          <input
            class="grow mono"
            aria-label="Command"
            placeholder="a command for the background, such as python3 -m http.server"
            value={command}
            onInput={(event) => (command.value = event.currentTarget.value)}
          />
          <button type="submit" disabled={!command.value}>
            Start
          </button>
        </form>
      )}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th>Command</th>
              <th>Kind</th>
              <th>State</th>
              <th>pid</th>
              <th class="wide">Since</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {list.map((item) => (
              <Row
                key={item.id}
                id={id}
                item={item}
                chosen={item.id === chosen.value}
                onChoose={() => (chosen.value = item.id)}
                onChange={live.refresh}
              />
            ))}
          </tbody>
        </table>
      </div>
      {list.length === 0 && <p class="dim">No background process.</p>}
      {chosen.value && <Log key={chosen.value} id={id} process={chosen.value} />}
    </div>
  );
}
