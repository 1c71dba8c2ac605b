// The tokens of a trajectory: what each says, how likely it was, whether it is learned from, and by which version.

import { useSignal } from "@preact/signals";
import type { Trajectory } from "../../api/schema";
import { visibleBlock } from "../../text";

const MAX_TOKENS = 20_000; // in the document
const UNLIKELY = 4; // nats; what is less likely is red

function heat(logprob: number, text: boolean): string {
  const share = Math.round(Math.min(1, -logprob / UNLIKELY) * 100);
  const colour = `color-mix(in srgb, var(--bad) ${share}%, var(--good))`;
  return text ? `color-mix(in srgb, ${colour} 35%, transparent)` : colour;
}

function told(one: Trajectory, pieces: string[], index: number): string {
  const text = pieces[index] ? ` “${visibleBlock(pieces[index]!)}”` : "";
  if (one.mask?.[index] !== 1) return `token ${one.tokens?.[index]}${text}: read, not learned from`;
  return `token ${one.tokens?.[index]}${text}: ${(one.logprobs?.[index] ?? 0).toFixed(3)}, version ${one.versions?.[index]}`;
}

export function Tokens({ one, pieces, reason }: { one: Trajectory; pieces: string[]; reason: string }) {
  const chosen = useSignal(-1);
  const cells = useSignal(false);
  const { tokens = [], mask = [], logprobs = [], versions = [] } = one;
  const text = pieces.length > 0 && !cells.value;
  const choose = (event: MouseEvent): void => {
    const index = (event.target as HTMLElement).dataset.index;
    if (index !== undefined) chosen.value = Number(index);
  };
  const walk = (event: KeyboardEvent): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    chosen.value = Math.max(0, Math.min(tokens.length - 1, chosen.value + step));
  };
  return (
    <section>
      <div class="line">
        <h2>Tokens</h2>
        {pieces.length > 0 && (
          <label>
            <input type="checkbox" checked={cells} onChange={(event) => (cells.value = event.currentTarget.checked)} /> as cells
          </label>
        )}
        <span class="dim" role="status" data-testid="token">
          {chosen.value >= 0 ? told(one, pieces, chosen.value) : "Choose one; arrow keys go on."}
        </span>
      </div>
      <div class={text ? "tokens text" : "tokens"} role="group" aria-label="Tokens" data-testid="tokens" tabIndex={0} onClick={choose} onKeyDown={walk}>
        {tokens.slice(0, MAX_TOKENS).map((_, index) => {
          const trained = mask[index] === 1;
          const newer = index > 0 && trained && versions[index - 1]! >= 0 && versions[index] !== versions[index - 1];
          return (
            <i
              key={index}
              data-index={index}
              class={`${trained ? "trained" : ""}${newer ? " newer" : ""}${index === chosen.value ? " chosen" : ""}`}
              style={trained ? { background: heat(logprobs[index] ?? 0, text) } : undefined}
              title={told(one, pieces, index)}
            >
              {text ? visibleBlock(pieces[index]!) : ""}
            </i>
          );
        })}
      </div>
      <p class="dim">
        Green is likely, red unlikely; what has no colour was read and is not learned from. A line stands where a newer policy went on.
        {tokens.length > MAX_TOKENS && ` The first ${MAX_TOKENS} of ${tokens.length}.`} {visibleBlock(reason)}
      </p>
    </section>
  );
}
