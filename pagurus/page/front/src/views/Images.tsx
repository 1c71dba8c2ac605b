import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import { lines } from "../api/client";
import type { ImageInfo, PullProgress } from "../api/schema";
import { attempt, isAdmin, useLive } from "../state";
import { bytes, moment, visible } from "../text";
import { Ask } from "../ui/parts";
import { Builds } from "./Builds";

function Pull({ onDone }: { onDone: () => void }) {
  const reference = useSignal("");
  const state = useSignal("");
  const pull = async (event: Event): Promise<void> => {
    event.preventDefault();
    state.value = "…";
    await attempt(async () => {
      for await (const step of lines<PullProgress>("POST", "/v1/images/pull/stream", { body: { reference: reference.value } })) {
        if (step.error) throw new Error(step.error.message);
        state.value = step.image ? `${step.image.name} is there` : `${bytes(step.done ?? 0)} of ${bytes(step.total ?? 0)}`;
      }
    });
    onDone();
  };
  return (
    <form class="bar-of-tools" onSubmit={(event) => void pull(event)}>
      <input
        class="grow mono"
        aria-label="Reference"
        placeholder="docker.io/library/python:3.12"
        value={reference}
        onInput={(event) => (reference.value = event.currentTarget.value)}
      />
      <button type="submit" disabled={!reference.value}>
        Pull
      </button>
      <span class="dim">{visible(state.value)}</span>
    </form>
  );
}

function Row({ item, onRemove }: { item: ImageInfo; onRemove: () => Promise<void> }) {
  return (
    <tr>
      <td>
        <b>{visible(item.name)}</b>
      </td>
      <td class="number">{bytes(item.size ?? 0)}</td>
      <td class="number">{item.used_by ?? 0}</td>
      <td class="wide">{moment(item.created_at)}</td>
      <td class="wide dim">{visible(item.source ?? "")}</td>
      <td class="wide mono dim">{item.digest.slice(0, 12)}</td>
      <td class="buttons">
        {isAdmin.value && (
          <Ask title={`Remove the image ${visible(item.name)}?`} act={onRemove} plain>
            Remove
          </Ask>
        )}
      </td>
    </tr>
  );
}

export function ImagesView() {
  const live = useLive("images", (signal) => api.images({ signal }), 10);
  return (
    <section>
      <h1>Images</h1>
      {isAdmin.value && <Pull onDone={live.refresh} />}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th>Name</th>
              <th>Size</th>
              <th>Used by</th>
              <th class="wide">Made</th>
              <th class="wide">From</th>
              <th class="wide">Content</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {(live.value.value ?? []).map((item) => (
              <Row
                key={item.name}
                item={item}
                onRemove={() => attempt(() => api.removeImage(item.name), "Removed.").then(live.refresh)}
              />
            ))}
          </tbody>
        </table>
      </div>
      {isAdmin.value && <Builds />}
      <p class="dim">
        Build one with <code>pagurus image build</code>, or make one of a checkpoint with <code>pagurus image commit</code>.
      </p>
    </section>
  );
}
