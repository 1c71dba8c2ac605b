// Where each checkpoint of a tree stands: a row for each, the oldest first, and a lane, as version control shows its
// history. Pure.
//
//   lane 0   lane 1
//     ●                    a
//     ├────────╮
//     ●        │           b   continues the lane of a: the head descends from it
//     │        ●           c   branches off
//     ●        │           d
//              ●           e

import type { CheckpointInfo } from "../api/schema";

export interface Placed {
  rows: Map<string, number>; // by id
  lanes: number[]; // by row
  parents: number[]; // row of the parent, -1: none
  width: number; // lanes in all
}

/** Places checkpoints that come the oldest first. The lane of `head` is the first. */
export function place(checkpoints: CheckpointInfo[], head: string | null | undefined): Placed {
  const rows = new Map(checkpoints.map((item, row) => [item.id, row]));
  const parents = checkpoints.map((item, row) => {
    const found = item.parent ? rows.get(item.parent) : undefined;
    return found !== undefined && found < row ? found : -1;
  });
  const main = mainChildren(parents, onTheWay(parents, head ? rows.get(head) : undefined));
  const ends = chainEnds(main);
  const lanes = new Array<number>(checkpoints.length).fill(-1);
  const free = new FreeLanes();
  const branches = new Map<number, number[]>();
  parents.forEach((parent, row) => {
    if (parent < 0 || main[parent] === row) return;
    const others = branches.get(parent);
    if (others) others.push(row);
    else branches.set(parent, [row]);
  });
  for (let row = 0; row < lanes.length; row += 1) {
    if (lanes[row] === -1) lanes[row] = free.take(row, ends[row]!); // a root
    const next = main[row]!;
    if (next >= 0) lanes[next] = lanes[row]!;
    for (const branch of branches.get(row) ?? []) lanes[branch] = free.take(row, ends[branch]!);
  }
  return { rows, lanes, parents, width: free.width };
}

/** Which rows are the head or its ancestors. */
function onTheWay(parents: number[], head: number | undefined): boolean[] {
  const way = new Array<boolean>(parents.length).fill(false);
  for (let row = head ?? -1; row >= 0; row = parents[row]!) way[row] = true;
  return way;
}

/** Of each row the child that continues its lane: the one towards the head, else the one with the newest descendant. */
function mainChildren(parents: number[], way: boolean[]): number[] {
  const newest = parents.map((_, row) => row);
  for (let row = parents.length - 1; row >= 0; row -= 1) {
    const parent = parents[row]!;
    if (parent >= 0) newest[parent] = Math.max(newest[parent]!, newest[row]!);
  }
  const main = new Array<number>(parents.length).fill(-1);
  parents.forEach((parent, row) => {
    if (parent < 0) return;
    const other = main[parent]!;
    const better = other < 0 || (way[row] && !way[other]) || (!way[other] && newest[row]! > newest[other]!);
    if (better) main[parent] = row;
  });
  return main;
}

/** Of each row the last row of the lane that begins there. */
function chainEnds(main: number[]): number[] {
  const ends = main.map((_, row) => row);
  for (let row = main.length - 1; row >= 0; row -= 1) if (main[row]! >= 0) ends[row] = ends[main[row]!]!;
  return ends;
}

/** Lanes that are taken until a row; the first free one is given. */
class FreeLanes {
  private until: number[] = []; // by lane: the last row that it is taken for

  get width(): number {
    return this.until.length;
  }

  take(row: number, end: number): number {
    let lane = this.until.findIndex((last) => last < row);
    if (lane < 0) lane = this.until.push(-1) - 1;
    this.until[lane] = end;
    return lane;
  }
}
