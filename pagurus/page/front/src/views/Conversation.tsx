// What the agent asked its model, and what it was answered, from the gateway's journal.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { ExchangeInfo } from "../api/schema";
import { attempt, link, useLive } from "../state";
import { bytes, clock, decoded, visible, visibleBlock } from "../text";
import { messages, type Said } from "../ui/messages";
import { Chip } from "../ui/parts";

function Content({ id, item }: { id: string; item: ExchangeInfo }) {
  const said = useSignal<Said[] | null>(null);
  useEffect(() => {
    void attempt(async () => {
      const complete = await api.exchange(id, item.id);
      said.value = messages(decoded(complete.request), decoded(complete.response));
    });
  }, [id, item.id, item.state]);
  return (
    <div class="conversation" data-testid="exchange">
      {(said.value ?? []).map((one, number) => (
        <div key={number} class={`said ${one.role}`}>
          <div class="dim">{visible(one.role)}</div>
          <pre>{visibleBlock(one.text)}</pre>
        </div>
      ))}
    </div>
  );
}

function Line({ item, chosen, onChoose }: { item: ExchangeInfo; chosen: boolean; onChoose: () => void }) {
  return (
    <li class={chosen ? "chosen" : ""}>
      <button class="link" onClick={onChoose}>
        turn {item.turn ?? 0} <span class="dim">{clock(item.started_at)}</span>
      </button>{" "}
      <Chip kind={item.state}>{item.state}</Chip>
      {!item.main && <Chip>beside</Chip>}
      {(item.from_record ?? 0) > 0 && <Chip kind="replayed">replayed × {item.from_record}</Chip>}
      <span class="dim"> {bytes((item.request_bytes ?? 0) + (item.response_bytes ?? 0))}</span>
    </li>
  );
}

export function ConversationTab({ id }: { id: string }) {
  const live = useLive(`${id}/exchanges`, (signal) => api.exchanges(id, { signal }), 3);
  const chosen = useSignal<number | null>(null);
  const list = live.value.value ?? [];
  const item = list.find((one) => one.id === chosen.value) ?? list[list.length - 1];
  if (live.error.value) return <p class="dim">{visible(live.error.value)}</p>;
  if (!item) return <p class="dim">Nothing was asked of a model through the gateway of this sandbox.</p>;
  return (
    <div class="two">
      <ol class="exchanges">
        {list.map((one) => (
          <Line key={one.id} item={one} chosen={one.id === item.id} onChoose={() => (chosen.value = one.id)} />
        ))}
      </ol>
      <div>
        {item.checkpoint && (
          <p class="dim">
            The state in which it was asked: <a href={link("s", id, "tree")}>{item.checkpoint}</a>
          </p>
        )}
        <Content key={item.id} id={id} item={item} />
      </div>
    </div>
  );
}
