// The rows of the timeline: checkpoints and the turns that made them, and turns that needed none. Pure.

import type { CheckpointInfo, TurnInfo, Verdict } from "../api/schema";

export interface TimelineRow {
  key: string;
  checkpoint: CheckpointInfo | null;
  index: number; // of the checkpoint; -1: none
  turn: TurnInfo | null;
  verdict: Verdict | null;
  thinking: number | null; // seconds between the turn before and this one
}

export interface Timeline {
  rows: TimelineRow[];
  rowOf: number[]; // by checkpoint
}

/** Checkpoints and turns of the sandbox `id`, the oldest first. */
export function timeline(id: string, checkpoints: CheckpointInfo[], turns: TurnInfo[]): Timeline {
  const thinking = pauses(turns);
  const made = new Map<string, TurnInfo>();
  for (const turn of turns) if (turn.checkpoint) made.set(turn.checkpoint, turn);
  const existing = new Set(checkpoints.map((item) => item.id));
  const rows: TimelineRow[] = checkpoints.map((item, index) => {
    const turn = item.sandbox === id ? (made.get(item.id) ?? null) : null;
    return { key: item.id, checkpoint: item, index, turn, verdict: item.verdict, thinking: turn ? (thinking.get(turn.turn) ?? null) : null };
  });
  const without = turns.filter((turn) => !turn.checkpoint || !existing.has(turn.checkpoint));
  for (const turn of without) {
    rows.push({ key: `turn-${turn.turn}-${turn.started_at}`, checkpoint: null, index: -1, turn, verdict: turn.verdict, thinking: thinking.get(turn.turn) ?? null });
  }
  rows.sort((one, other) => at(one) - at(other) || one.index - other.index);
  // The order of checkpoints is theirs: two clocks never put a child above its parent.
  const indices = rows.filter((row) => row.index >= 0).map((row) => row.index).sort((one, other) => one - other);
  const byIndex = new Map(rows.filter((row) => row.index >= 0).map((row) => [row.index, row]));
  let next = 0;
  const ordered = rows.map((row) => (row.index < 0 ? row : byIndex.get(indices[next++]!)!));
  const rowOf = new Array<number>(checkpoints.length).fill(0);
  ordered.forEach((row, number) => {
    if (row.index >= 0) rowOf[row.index] = number;
  });
  return { rows: ordered, rowOf };
}

function at(row: TimelineRow): number {
  if (row.checkpoint) return row.checkpoint.created_at ?? 0;
  return row.turn!.started_at + row.turn!.duration;
}

function pauses(turns: TurnInfo[]): Map<number, number> {
  const result = new Map<number, number>();
  for (let index = 1; index < turns.length; index += 1) {
    const before = turns[index - 1]!;
    const pause = turns[index]!.started_at - before.started_at - before.duration;
    if (pause >= 0) result.set(turns[index]!.turn, pause);
  }
  return result;
}
