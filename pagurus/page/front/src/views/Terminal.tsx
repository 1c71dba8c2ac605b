// A terminal of the sandbox. It is the API's own: it outlives this page, and a restore takes it back like everything
// else in the sandbox; whoever sits at it stays seated.

import { useEffect, useRef } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { socket } from "../api/client";
import * as api from "../api/calls";
import type { ProcessInfo } from "../api/schema";
import { attempt, mayAct, useLive } from "../state";
import { visible } from "../text";
import { Act } from "../ui/parts";
import { screen } from "../ui/terminal";

const PAUSE = 500; // ms between two attempts to sit down again
const ATTEMPTS = 40;

/** Carries bytes between the screen and the terminal `name`; how to leave it. */
function sit(id: string, name: string, element: HTMLElement, say: (text: string) => void): () => void {
  const shown = screen(element);
  let at: number | null = null; // offset of the output seen so far
  let connection: WebSocket | null = null;
  let attempts = 0;
  let left = false;
  const size = (): string => JSON.stringify({ rows: shown.terminal.rows, columns: shown.terminal.cols });
  const attach = (): void => {
    const { rows, cols } = shown.terminal;
    connection = socket(api.terminalPath(id, name), { since: at, rows, columns: cols });
    connection.onmessage = (event) => {
      attempts = 0;
      if (typeof event.data === "string") {
        const said = JSON.parse(event.data) as { start?: number; exit?: number };
        if (said.start !== undefined) {
          at = said.start;
          say("connected");
        }
        if (said.exit !== undefined) {
          left = true;
          say(`ended with code ${said.exit}`);
        }
        return;
      }
      const data = new Uint8Array(event.data as ArrayBuffer);
      at = (at ?? 0) + data.length;
      shown.terminal.write(data);
    };
    connection.onclose = () => {
      if (left) return;
      attempts += 1;
      say(attempts < ATTEMPTS ? "connecting again…" : "not connected");
      if (attempts < ATTEMPTS) setTimeout(() => !left && attach(), PAUSE);
    };
  };
  const open = (): boolean => connection?.readyState === WebSocket.OPEN;
  const encoder = new TextEncoder();
  shown.terminal.onData((text) => open() && connection!.send(encoder.encode(text)));
  shown.terminal.onBinary((text) => open() && connection!.send(Uint8Array.from(text, (item) => item.charCodeAt(0))));
  shown.terminal.onResize(() => open() && connection!.send(size()));
  attach();
  shown.terminal.attachCustomKeyEventHandler((event) => {
    const leave = event.ctrlKey && event.shiftKey && event.code === "KeyL";
    if (leave && event.type === "keydown") document.querySelector<HTMLElement>(".tabs [aria-current]")?.focus();
    return !leave; // Tab belongs to the shell
  });
  shown.terminal.focus();
  return () => {
    left = true;
    connection?.close();
    shown.close();
  };
}

function Seat({ id, name }: { id: string; name: string }) {
  const element = useRef<HTMLDivElement>(null);
  const state = useSignal("connecting…");
  useEffect(() => sit(id, name, element.current!, (text) => (state.value = text)), [id, name]);
  return (
    <>
      <div class="dim">
        <span data-testid="terminal-state">{state}</span> · Ctrl+Shift+L leaves it by the keyboard
      </div>
      <div class="screen" ref={element} />
    </>
  );
}

function running(list: ProcessInfo[]): ProcessInfo[] {
  return list.filter((item) => item.kind === "terminal" && item.state === "running");
}

export function TerminalTab({ id }: { id: string }) {
  const live = useLive(`${id}/terminals`, async (signal) => running(await api.processes(id, { signal })), 3);
  const chosen = useSignal<string | null>(null);
  const open = async (): Promise<void> => {
    const made = await attempt(() => api.openTerminal(id, 24, 80));
    if (made) chosen.value = made.id;
    live.refresh();
  };
  if (!mayAct.value) return <p class="dim">This token may only read; a terminal acts.</p>;
  return (
    <div class="column">
      <div class="bar-of-tools">
        {(live.value.value ?? []).map((item) => (
          <button
            key={item.id}
            class={item.id === chosen.value ? "chosen" : "plain"}
            onClick={() => (chosen.value = item.id)}
          >
            {visible(item.command)} <span class="dim">{item.id}</span>
          </button>
        ))}
        <Act onClick={() => void open()}>New terminal</Act>
      </div>
      {chosen.value ? (
        <Seat key={chosen.value} id={id} name={chosen.value} />
      ) : (
        <p class="dim">Choose a terminal, or open a new one. It stays when this page is closed.</p>
      )}
    </div>
  );
}
