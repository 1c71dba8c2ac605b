// One trajectory, turn by turn: what the model wrote and saw, and its tokens by how likely they were.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { Trajectory, TurnRecord } from "../api/schema";
import { attempt, link } from "../state";
import { ms, visible, visibleBlock } from "../text";
import { Chip } from "../ui/parts";

const MAX_TOKENS = 20_000; // of the strip
const UNLIKELY = 4; // nats; what is less likely is red

function heat(logprob: number): string {
  return `color-mix(in srgb, var(--bad) ${Math.round(Math.min(1, -logprob / UNLIKELY) * 100)}%, var(--good))`;
}

function Tokens({ one }: { one: Trajectory }) {
  const { tokens = [], mask = [], logprobs = [], versions = [] } = one;
  return (
    <div class="tokens" aria-label="Tokens" data-testid="tokens">
      {tokens.slice(0, MAX_TOKENS).map((token, index) => {
        const trained = mask[index] === 1;
        const newer = index > 0 && trained && versions[index - 1]! >= 0 && versions[index] !== versions[index - 1];
        return (
          <i
            key={index}
            class={`${trained ? "trained" : ""}${newer ? " newer" : ""}`}
            style={trained ? { background: heat(logprobs[index] ?? 0) } : undefined}
            title={trained ? `token ${token}: ${(logprobs[index] ?? 0).toFixed(3)}, version ${versions[index]}` : `token ${token}: read`}
          />
        );
      })}
    </div>
  );
}

function Turn({ turn }: { turn: TurnRecord }) {
  const executed = (turn.exec_end ?? 0) - (turn.exec_start ?? 0);
  const thought = (turn.gen_end ?? 0) - (turn.gen_start ?? 0);
  return (
    <article class="step">
      <div class="line">
        <b>turn {turn.index}</b>
        <Chip kind={turn.verdict}>{turn.verdict ?? "none"}</Chip>
        {(turn.reward ?? 0) !== 0 && <Chip>reward {turn.reward}</Chip>}
        {(turn.restored ?? 0) > 0 && <Chip kind="replayed">restored × {turn.restored}</Chip>}
        <span class="dim">
          thought {ms(thought * 1000)} · ran {ms(executed * 1000)} · {turn.tokens ?? 0} tokens · version {turn.version ?? -1}
          {turn.checkpoint && ` · frozen ${ms(turn.frozen_ms ?? 0)}`}
        </span>
      </div>
      <pre class="said assistant">{visibleBlock(turn.action ?? "")}</pre>
      <pre class="said user">{visibleBlock(turn.observation ?? "")}</pre>
      {(turn.effects ?? []).length > 0 && <div class="dim">{visible((turn.effects ?? []).join("; "))}</div>}
    </article>
  );
}

export function TrajectoryView({ prompt, member }: { prompt: string; member: string }) {
  const one = useSignal<Trajectory | null>(null);
  useEffect(() => {
    void attempt(async () => (one.value = await api.runTrajectory(prompt, member)));
  }, [prompt, member]);
  const it = one.value;
  if (!it) return <p class="wait">…</p>;
  return (
    <section>
      <div class="bar-of-tools">
        <a href={link("run")}>All trajectories</a>
        <h1>
          {visible(prompt)}/{member}
        </h1>
        <Chip kind={it.status === "completed" ? "ok" : "failed"}>{it.status ?? "completed"}</Chip>
        <span>reward {it.reward ?? 0}</span>
        {it.reason && <span class="dim">{visible(it.reason)}</span>}
      </div>
      <Tokens one={it} />
      <p class="dim">
        Each cell is a token; grey ones were read. Green is likely, red unlikely; a line stands where a newer policy went on. The
        same on the command line, and states to go back to: <code>pagurus rollouts show RUN {visible(prompt)}/{member}</code>
      </p>
      {it.opening && <pre class="said user">{visibleBlock(it.opening)}</pre>}
      {(it.turns ?? []).map((turn) => (
        <Turn key={turn.index} turn={turn} />
      ))}
    </section>
  );
}
