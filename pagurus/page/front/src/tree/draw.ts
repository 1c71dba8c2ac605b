// The picture of a placed tree on a canvas: in rows beside the timeline, and the whole of it in one look.

import type { CheckpointInfo } from "../api/schema";
import type { Placed } from "./layout";

export const ROW = 34; // pixels
const MAX_GRAPH = 260; // pixels
const LANES = ["#e07a3f", "#4a90d9", "#57a773", "#b565a7", "#c9a227", "#2aa198", "#d9534a", "#7a7fd0"];

export interface Look {
  text: string;
  background: string;
  accent: string;
}

export function laneWidth(placed: Placed): number {
  return Math.max(3, Math.min(16, (MAX_GRAPH - 20) / Math.max(1, placed.width)));
}

export function graphWidth(placed: Placed): number {
  return Math.min(MAX_GRAPH, Math.ceil(laneWidth(placed) * placed.width + 14));
}

export function colour(lane: number): string {
  return LANES[lane % LANES.length]!;
}

/** Sizes a canvas for the screen that it is on. */
export function prepared(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The rows in sight, from `top` pixels of all on. `rowOf`: the row of the timeline in which a checkpoint stands. */
export function drawRows(
  context: CanvasRenderingContext2D,
  placed: Placed,
  rowOf: number[],
  top: number,
  height: number,
  marked: Set<number>,
  look: Look,
): void {
  const step = laneWidth(placed);
  const x = (lane: number): number => 10 + lane * step;
  const y = (index: number): number => (rowOf[index]! + 0.5) * ROW - top;
  context.lineWidth = step < 6 ? 1 : 2;
  placed.parents.forEach((parent, child) => {
    if (parent < 0) return;
    const from = y(parent);
    const to = y(child);
    if (to < -ROW || from > height + ROW) return;
    const [start, end] = [x(placed.lanes[parent]!), x(placed.lanes[child]!)];
    context.strokeStyle = colour(placed.lanes[child]!);
    context.beginPath();
    context.moveTo(start, from);
    if (start !== end) context.bezierCurveTo(start, from + ROW * 0.7, end, from + ROW * 0.3, end, from + ROW);
    context.lineTo(end, to);
    context.stroke();
  });
  const radius = Math.max(2.5, Math.min(5, step / 2.5));
  placed.lanes.forEach((lane, index) => {
    const at = y(index);
    if (at < -ROW || at > height + ROW) return;
    const full = marked.has(index);
    context.beginPath();
    context.arc(x(lane), at, full ? radius + 1.5 : radius, 0, 2 * Math.PI);
    context.fillStyle = full ? look.accent : look.background;
    context.fill();
    context.strokeStyle = colour(lane);
    context.stroke();
  });
}

/** All of the tree, from left to right. */
export function drawAll(
  context: CanvasRenderingContext2D,
  placed: Placed,
  checkpoints: CheckpointInfo[],
  size: { width: number; height: number },
  marked: Set<number>,
  look: Look,
): void {
  const { x, y } = scales(placed, size);
  const dense = x(1) - x(0) < 4;
  const paths = LANES.map(() => new Path2D()); // one for each colour: ten thousand strokes would take a moment
  placed.parents.forEach((parent, child) => {
    if (parent < 0) return;
    const [start, end] = [y(placed.lanes[parent]!), y(placed.lanes[child]!)];
    const path = paths[placed.lanes[child]! % LANES.length]!;
    path.moveTo(x(parent), start);
    if (dense || start === end) {
      path.lineTo(x(parent), end);
    } else {
      const bend = Math.min(x(child) - x(parent), 18);
      path.bezierCurveTo(x(parent) + bend / 2, start, x(parent) + bend / 2, end, x(parent) + bend, end);
    }
    path.lineTo(x(child), end);
  });
  context.lineWidth = dense ? 0.7 : 1.5;
  paths.forEach((path, number) => {
    context.strokeStyle = LANES[number]!;
    context.stroke(path);
  });
  checkpoints.forEach((item, index) => {
    if (dense && !marked.has(index) && !item.label) return;
    context.beginPath();
    context.arc(x(index), y(placed.lanes[index]!), marked.has(index) ? 5 : 3.5, 0, 2 * Math.PI);
    context.fillStyle = marked.has(index) ? look.accent : item.label ? look.text : colour(placed.lanes[index]!);
    context.fill();
  });
}

/** Where a checkpoint of the whole picture is. */
export function scales(placed: Placed, size: { width: number; height: number }) {
  const count = Math.max(2, placed.lanes.length);
  const across = Math.min(26, (size.width - 24) / (count - 1));
  const down = Math.min(20, (size.height - 20) / Math.max(1, placed.width - 1));
  return { x: (index: number): number => 12 + index * across, y: (lane: number): number => 10 + lane * down };
}
