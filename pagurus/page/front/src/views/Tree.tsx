// The checkpoints of a sandbox as a tree, beside the timeline of its turns.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { useSignal, type Signal } from "@preact/signals";
import * as api from "../api/calls";
import type { CheckpointInfo, SandboxInfo, TurnInfo } from "../api/schema";
import { attempt, useLive } from "../state";
import { bytes, clock, ms, visible } from "../text";
import { ROW, drawAll, drawRows, graphWidth, prepared, scales, type Look } from "../tree/draw";
import { place, type Placed } from "../tree/layout";
import { timeline, type Timeline, type TimelineRow } from "../tree/timeline";
import { Act, Chip, Rows } from "../ui/parts";
import { CheckpointPanel } from "./Checkpoint";

const MAX_OVERVIEW = 120; // pixels

function overviewHeight(placed: Placed): number {
  return Math.max(40, Math.min(MAX_OVERVIEW, 20 * placed.width + 10));
}

interface Tree {
  checkpoints: CheckpointInfo[];
  turns: TurnInfo[];
}

/** Two times, the unit once where it is one. */
function pair(frozen: number, total: number): string {
  const [one, other] = [ms(frozen), ms(total)];
  const unit = one.slice(one.indexOf(" "));
  return `${other.endsWith(unit) ? one.slice(0, -unit.length) : one} / ${other}`;
}

function colours(): Look {
  const style = getComputedStyle(document.documentElement);
  const value = (name: string): string => style.getPropertyValue(name).trim();
  return { text: value("--text"), background: value("--back"), accent: value("--accent") };
}

function Overview({ placed, checkpoints, marked, onPick }: {
  placed: Placed;
  checkpoints: CheckpointInfo[];
  marked: Set<number>;
  onPick: (index: number) => void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    let timer = 0;
    const draw = (): void => {
      const at = canvas.current;
      if (!at) return;
      const size = { width: at.parentElement!.clientWidth, height: overviewHeight(placed) };
      drawAll(prepared(at, size.width, size.height), placed, checkpoints, size, marked, colours());
    };
    const soon = (): void => {
      clearTimeout(timer);
      timer = window.setTimeout(draw); // once the rows are there
    };
    const observer = new ResizeObserver(soon);
    observer.observe(canvas.current!.parentElement!);
    return () => {
      clearTimeout(timer);
      observer.disconnect();
    };
  }, [placed, checkpoints, marked]);
  const pick = (event: MouseEvent): void => {
    const at = canvas.current!;
    const { x, y } = scales(placed, { width: at.clientWidth, height: overviewHeight(placed) });
    const distance = (index: number): number =>
      Math.hypot(x(index) - event.offsetX, (y(placed.lanes[index]!) - event.offsetY) / 2);
    let best = 0;
    for (let index = 1; index < placed.lanes.length; index += 1) if (distance(index) < distance(best)) best = index;
    onPick(best);
  };
  return (
    <div class="overview" style={{ height: `${overviewHeight(placed) + 2}px` }}>
      <canvas ref={canvas} onClick={pick} aria-hidden="true" data-testid="overview" />
    </div>
  );
}

function Row({ row, chosen, head, indent, onChoose }: {
  row: TimelineRow;
  chosen: boolean;
  head: boolean;
  indent: number;
  onChoose: () => void;
}) {
  const { checkpoint, turn } = row;
  const text = turn?.command ?? (checkpoint?.parent ? "checkpoint" : "created");
  return (
    <div
      class={`row turn${chosen ? " chosen" : ""}${checkpoint ? "" : " without"}`}
      role="option"
      style={{ paddingLeft: `${indent}px` }}
      aria-selected={chosen}
      data-checkpoint={checkpoint?.id}
      onClick={onChoose}
    >
      <span class="what">
        {head && <Chip kind="head">head</Chip>}
        {checkpoint?.label && <Chip kind="label">{visible(checkpoint.label)}</Chip>}
        <span class="mono">{visible(text)}</span>
        {turn !== null && turn.exit_code !== 0 && <span class="bad"> exit {turn.exit_code}</span>}
      </span>
      <span>{row.verdict && <Chip kind={row.verdict}>{row.verdict}</Chip>}</span>
      <span class="why wide dim" title={visible(turn?.reason ?? "")}>
        {visible(turn?.reason ?? "")}
      </span>
      <span class="number wide">
        {checkpoint && checkpoint.state !== "pending" ? pair(checkpoint.frozen_ms ?? 0, checkpoint.total_ms ?? 0) : (checkpoint?.state ?? "")}
      </span>
      <span class="number wide">{checkpoint ? bytes(checkpoint.stored_bytes ?? 0) : ""}</span>
      <span class="number wide dim" title="time that the model took before this turn">
        {row.thinking !== null ? `${row.thinking.toFixed(1)} s` : ""}
      </span>
      <span class="number dim">{clock(checkpoint?.created_at ?? turn?.started_at ?? 0)}</span>
    </div>
  );
}

function RowHead({ indent }: { indent: number }) {
  return (
    <div class="columns turn" style={{ paddingLeft: `${indent}px` }} aria-hidden="true">
      <span>Command</span>
      <span>Verdict</span>
      <span class="wide">Why</span>
      <span class="number wide">Frozen / total</span>
      <span class="number wide">Stored</span>
      <span class="number wide">Thought</span>
      <span class="number">At</span>
    </div>
  );
}

function Lanes({ placed, line, marked, scrolled }: {
  placed: Placed;
  line: Timeline;
  marked: Set<number>;
  scrolled: Signal<{ top: number; size: number }>;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { top, size } = scrolled.value;
  useEffect(() => {
    const context = prepared(canvas.current!, graphWidth(placed), size);
    drawRows(context, placed, line.rowOf, top, size, marked, colours());
  }, [placed, line, marked, top, size]);
  return <canvas class="lanes" ref={canvas} aria-hidden="true" />;
}

function useTree(info: SandboxInfo) {
  const live = useLive<Tree>(
    `${info.id}/tree`,
    async (signal) => {
      const [checkpoints, turns] = await Promise.all([api.checkpoints(info.id, { signal }), api.turns(info.id, { signal })]);
      return { checkpoints, turns };
    },
    0,
  );
  useEffect(() => live.refresh(), [info.head, info.turn, info.state]);
  const tree = live.value.value;
  const pending = tree?.checkpoints.some((item) => item.state === "pending" || item.state === "captured") ?? false;
  useEffect(() => {
    if (!pending) return undefined;
    const timer = setTimeout(live.refresh, (tree?.checkpoints.length ?? 0) > 1000 ? 5000 : 1000);
    return () => clearTimeout(timer);
  }, [tree, pending]);
  return live;
}

export function TreeTab({ info }: { info: SandboxInfo }) {
  const live = useTree(info);
  const chosen = useSignal<string | null>(null);
  const scrolled = useSignal({ top: 0, size: 400 });
  const list = useRef<HTMLDivElement>(null);
  const tree = live.value.value;
  const placed = useMemo(() => place(tree?.checkpoints ?? [], info.head), [tree, info.head]);
  const line = useMemo(() => timeline(info.id, tree?.checkpoints ?? [], tree?.turns ?? []), [tree]);
  const marked = useMemo(() => {
    const named = [info.head, chosen.value].filter((item) => item !== null && item !== undefined);
    return new Set(named.map((item) => placed.rows.get(item) ?? -1));
  }, [placed, info.head, chosen.value]);
  if (!tree) return <p class="wait">{visible(live.error.value) || "…"}</p>;
  const position = line.rows.findIndex((row) => row.key === chosen.value);
  const choose = (row: number): void => {
    const target = line.rows[Math.max(0, Math.min(line.rows.length - 1, row))];
    if (!target) return;
    chosen.value = target.key;
    const at = list.current?.querySelector(".rows");
    const top = line.rows.indexOf(target) * ROW;
    if (at && (top < at.scrollTop || top > at.scrollTop + at.clientHeight - ROW)) at.scrollTop = top - at.clientHeight / 2;
  };
  const key = (event: KeyboardEvent): void => {
    const all = line.rows.length;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -all, End: all }[event.key];
    if (step === undefined || !(event.target as HTMLElement).matches(".rows")) return;
    event.preventDefault();
    choose(position + step);
  };
  const selected = position >= 0 ? line.rows[position]! : null;
  const take = async (): Promise<void> => {
    const made = await attempt(() => api.takeCheckpoint(info.id, ""), "Captured.");
    live.refresh();
    if (made) chosen.value = made.id;
  };
  return (
    <div class="column">
      <Overview placed={placed} checkpoints={tree.checkpoints} marked={marked} onPick={(index) => choose(line.rowOf[index]!)} />
      <div class="bar-of-tools">
        <span class="dim" data-testid="tree-size">
          {tree.checkpoints.length} checkpoints, {tree.turns.length} turns
        </span>
        <span class="spacer" />
        <Act onClick={() => void take()} off={info.state !== "running"}>
          Checkpoint now
        </Act>
      </div>
      <div class={selected ? "tree with-panel" : "tree"} ref={list} onKeyDown={key}>
        <Rows
          head={<RowHead indent={graphWidth(placed) + 6} />}
          items={line.rows}
          height={ROW}
          label="Timeline"
          role="listbox"
          sight={scrolled}
          behind={<Lanes placed={placed} line={line} marked={marked} scrolled={scrolled} />}
          row={(row, number) => (
            <Row
              key={row.key}
              row={row}
              chosen={row.key === chosen.value}
              head={row.checkpoint !== null && row.checkpoint.id === info.head}
              indent={graphWidth(placed) + 6}
              onChoose={() => choose(number)}
            />
          )}
        />
        {selected && (
          <CheckpointPanel
            key={selected.key}
            info={info}
            row={selected}
            onChange={live.refresh}
            onClose={() => (chosen.value = null)}
          />
        )}
      </div>
    </div>
  );
}
