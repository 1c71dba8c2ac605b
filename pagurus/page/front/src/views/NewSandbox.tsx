import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import { useLive } from "../state";
import { visible } from "../text";
import { Dialog } from "../ui/parts";

interface Wish {
  image: string;
  name?: string;
  limits?: { memory: string };
}

export function NewSandbox({ onClose, onMade }: { onClose: () => void; onMade: (wish: Wish) => unknown }) {
  const images = useLive("images", (signal) => api.images({ signal }), 0);
  const image = useSignal("debian");
  const name = useSignal("");
  const memory = useSignal("1GiB");
  const submit = (event: Event): void => {
    event.preventDefault();
    onMade({ image: image.value, ...(name.value && { name: name.value }), limits: { memory: memory.value } });
    onClose();
  };
  return (
    <Dialog title="New sandbox" onClose={onClose}>
      <form onSubmit={submit} class="fields">
        <label>
          Image
          <select value={image} onChange={(event) => (image.value = event.currentTarget.value)}>
            {(images.value.value ?? []).map((item) => (
              <option key={item.name} value={item.name}>
                {visible(item.name)}
              </option>
            ))}
          </select>
        </label>
        <label>
          Name
          <input value={name} onInput={(event) => (name.value = event.currentTarget.value)} placeholder="none" />
        </label>
        <label>
          Memory
          <input value={memory} onInput={(event) => (memory.value = event.currentTarget.value)} />
        </label>
        <div class="buttons">
          <button type="button" class="plain" onClick={onClose}>
            Cancel
          </button>
          <button type="submit">Start</button>
        </div>
      </form>
    </Dialog>
  );
}
