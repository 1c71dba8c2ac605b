import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import { attempt, mayAct } from "../state";
import { bytes, visible, visibleBlock } from "../text";
import { Act } from "../ui/parts";
import { save } from "../ui/save";

const MAX_EDIT = 1 << 20; // bytes; what is larger is shown in part

interface Content {
  text: string;
  exact: boolean; // the text is all of the file, and gives the same bytes when it is written
}

function hexdump(data: Uint8Array): string {
  const rows: string[] = [];
  for (let at = 0; at < Math.min(data.length, 4096); at += 16) {
    const slice = [...data.subarray(at, at + 16)];
    const hex = slice.map((item) => item.toString(16).padStart(2, "0")).join(" ");
    const text = slice.map((item) => (item >= 32 && item < 127 ? String.fromCharCode(item) : ".")).join("");
    rows.push(`${at.toString(16).padStart(8, "0")}  ${hex.padEnd(47)}  ${text}`);
  }
  return rows.join("\n");
}

function read(data: Uint8Array, complete: boolean): Content {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
    return { text, exact: complete && visibleBlock(text) === text };
  } catch {
    return { text: hexdump(data), exact: false };
  }
}

/** The content of one file. It can be edited where what is shown is what is there. */
export function Editor({ id, path, onClose }: { id: string; path: string; onClose: () => void }) {
  const content = useSignal<Content | null>(null);
  const size = useSignal(0);
  const text = useSignal("");
  useEffect(() => {
    void attempt(async () => {
      const data = new Uint8Array(await api.readFile(id, path, { limit: MAX_EDIT + 1 }));
      size.value = data.length;
      content.value = read(data.subarray(0, MAX_EDIT), data.length <= MAX_EDIT);
      text.value = content.value.text;
    });
  }, [id, path]);
  const write = async (): Promise<void> => {
    if (await attempt(() => api.writeFile(id, path, text.value), "Written.")) content.value = { text: text.value, exact: true };
  };
  const editable = mayAct.value && content.value?.exact;
  return (
    <div class="column">
      <div class="bar-of-tools">
        <button class="plain" onClick={onClose}>
          Back
        </button>
        <b class="mono">{visible(path)}</b>
        <span class="dim">{size.value > MAX_EDIT ? `its first ${bytes(MAX_EDIT)}` : bytes(size.value)}</span>
        <span class="spacer" />
        <button class="plain" onClick={() => void attempt(async () => save(path.split("/").pop() ?? "file", await api.readFile(id, path)))}>
          Download
        </button>
        {content.value?.exact && (
          <Act off={text.value === content.value.text} onClick={() => void write()}>
            Save
          </Act>
        )}
      </div>
      {editable ? (
        <textarea
          class="editor mono"
          aria-label="Content"
          spellcheck={false}
          value={text}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
      ) : (
        <pre class="editor" data-testid="content" tabIndex={0}>
          {visibleBlock(content.value?.text ?? "")}
        </pre>
      )}
    </div>
  );
}
