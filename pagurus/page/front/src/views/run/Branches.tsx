// The trajectories of one prompt as a tree: turns from left to right, and where one branched off another.

import { useMemo } from "preact/hooks";
import type { RunMember } from "../../api/schema";
import { link } from "../../state";
import { visible } from "../../text";

const ROW = 24; // pixels
const LEFT = 10;
const WIDTH = 640;

interface Branch {
  one: RunMember;
  from: number; // turns that it has of its parent
  row: number;
  parent: Branch | null;
}

/** Rows such that each branch comes below the trajectory that it left. */
function arranged(members: RunMember[]): Branch[] {
  const above = (one: RunMember): number | undefined => one.lineage?.[one.lineage.length - 1]?.[0];
  const there = new Set(members.map((one) => one.member));
  const result: Branch[] = [];
  const add = (one: RunMember, parent: Branch | null): void => {
    const last = one.lineage?.[one.lineage.length - 1];
    const made = { one, from: parent && last ? last[2] : 0, row: result.length, parent };
    result.push(made);
    for (const child of members) if (above(child) === one.member && child !== one && !result.some((item) => item.one === child)) add(child, made);
  };
  for (const one of members) if (above(one) === undefined || !there.has(above(one)!)) add(one, null);
  return result;
}

export function Branches({ members, here }: { members: RunMember[]; here: string }) {
  const branches = useMemo(() => arranged(members), [members]);
  const turns = members.reduce((most, one) => Math.max(most, one.turns ?? 0), 1);
  const x = (turn: number): number => LEFT + (turn / turns) * (WIDTH - 2 * LEFT);
  const y = (row: number): number => (row + 0.5) * ROW;
  if (members.length < 2) return null;
  return (
    <section>
      <h2>Its group</h2>
      <div class="scroll branches" data-testid="branches">
        <svg width={WIDTH} height={branches.length * ROW} viewBox={`0 0 ${WIDTH} ${branches.length * ROW}`} role="presentation">
          {branches.map(({ one, from, row, parent }) => (
            <path
              key={one.member}
              class={String(one.member) === here ? "here" : ""}
              d={`${parent ? `M ${x(from)} ${y(parent.row)} V ${y(row)}` : `M ${x(0)} ${y(row)}`} H ${x(Math.max(one.turns ?? 0, from))}`}
            />
          ))}
          {branches.map(({ one, row }) => (
            <circle key={one.member} cx={x(one.turns ?? 0)} cy={y(row)} r={5} class={one.status !== "completed" ? "cut" : one.reward > 0 ? "pass" : "fail"} />
          ))}
        </svg>
        <ol>
          {branches.map(({ one, from, parent }) => (
            <li key={one.member}>
              <a href={link("run", one.prompt, String(one.member))} aria-current={String(one.member) === here ? "true" : undefined}>
                {visible(one.prompt)}/{one.member}
              </a>{" "}
              <span class="dim">
                {one.status === "completed" ? `reward ${one.reward}` : one.status}
                {parent && `, left ${parent.one.member} before turn ${from}`}
              </span>
            </li>
          ))}
        </ol>
      </div>
    </section>
  );
}
