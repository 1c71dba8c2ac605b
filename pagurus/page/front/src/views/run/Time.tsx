// Where the time of a run went: lanes of trainer, engines and trajectories, and what shares of it went to what.

import { useEffect, useRef } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../../api/calls";
import type { Bar, RunTimes, TimePart } from "../../api/schema";
import { useLive } from "../../state";
import { clock, duration, visible } from "../../text";
import { prepared } from "../../tree/draw";

const LANE = 14; // pixels
const MAX_HEIGHT = 420; // pixels of all lanes of a part
const OTHERS = ["#3b6fb6", "#e0912f", "#4f9d69", "#8c6d46", "#7d5ba6", "#c0504d", "#2a9d8f", "#b5651d", "#5c7cfa", "#d16ba5"];

function useColours(times: RunTimes): (kind: string) => string {
  const kinds = new Set(times.parts.flatMap((part) => [...(part.shares ?? []).map((item) => item.kind)]));
  const others = [...kinds].filter((kind) => !(kind in times.colours));
  return (kind) => times.colours[kind] ?? OTHERS[Math.max(0, others.indexOf(kind)) % OTHERS.length]!;
}

function Lanes({ part, times, colour }: { part: TimePart; times: RunTimes; colour: (kind: string) => string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const under = useSignal("");
  const lanes = part.lanes ?? [];
  const tall = Math.max(3, Math.min(LANE, MAX_HEIGHT / Math.max(1, lanes.length)));
  const length = Math.max(1e-9, times.until - times.since);
  useEffect(() => {
    const at = canvas.current!;
    const draw = (): void => {
      const width = at.parentElement!.clientWidth;
      const context = prepared(at, width, tall * lanes.length);
      lanes.forEach((lane, row) => {
        for (const bar of lane.bars) {
          const begin = ((Math.max(bar.begin, times.since) - times.since) / length) * width;
          const end = ((Math.min(bar.end, times.until) - times.since) / length) * width;
          const height = (tall - 1) * Math.min(1, bar.full ?? 1);
          context.fillStyle = colour(bar.kind);
          context.fillRect(begin, (row + 1) * tall - height, Math.max(0.7, end - begin), height);
        }
      });
    };
    const observer = new ResizeObserver(draw);
    observer.observe(at.parentElement!);
    draw();
    return () => observer.disconnect();
  }, [part, times]);
  const point = (event: MouseEvent): void => {
    const at = canvas.current!;
    const moment = times.since + (event.offsetX / at.clientWidth) * length;
    const lane = lanes[Math.floor(event.offsetY / tall)];
    const bar: Bar | undefined = lane?.bars.find((item) => item.begin <= moment && moment <= item.end);
    under.value = bar ? `${visible(bar.who)}: ${visible(bar.kind)}, ${(bar.end - bar.begin).toFixed(2)} s` : `${visible(lane?.name ?? "")} ${clock(moment)}`;
  };
  return (
    <>
      <div class="lanes-of-time">
        <canvas ref={canvas} onMouseMove={point} aria-hidden="true" />
      </div>
      <p class="dim">{under.value || " "}</p>
    </>
  );
}

function Part({ part, times, colour }: { part: TimePart; times: RunTimes; colour: (kind: string) => string }) {
  return (
    <section aria-label={part.title}>
      <h2>{visible(part.title)}</h2>
      {part.said && <p class="dim">{visible(part.said)}</p>}
      <Lanes part={part} times={times} colour={colour} />
      <table class="narrow">
        <tbody>
          {(part.shares ?? []).map((item) => (
            <tr key={item.kind}>
              <td>
                <i class="swatch" style={{ background: colour(item.kind) }} /> {visible(item.kind)}
              </td>
              <td class="number">{item.seconds.toFixed(1)} s</td>
              <td class="number">{(100 * item.share).toFixed(1)} %</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

export function TimeView() {
  const live = useLive("run/times", (signal) => api.runTimes({ signal }), 0);
  const times = live.value.value;
  if (!times) return <p class="dim">{visible(live.error.value) || "…"}</p>;
  return <Times times={times} refresh={live.refresh} />;
}

export function Times({ times, refresh }: { times: RunTimes; refresh: () => void }) {
  const colour = useColours(times);
  return (
    <>
      <div class="line">
        <span class="dim">
          {duration(times.until - times.since)} until {clock(times.until)}
          {times.left_out > 0 && `; the oldest ${times.left_out} bars are left out`}
        </span>
        <button class="plain" onClick={refresh}>
          Reload
        </button>
      </div>
      {times.parts
        .filter((part) => (part.lanes ?? []).length > 0)
        .map((part) => (
          <Part key={part.title} part={part} times={times} colour={colour} />
        ))}
    </>
  );
}
