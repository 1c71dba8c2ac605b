// The file tree of the sandbox: look, edit, upload, download.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { FileInfo } from "../api/schema";
import { attempt, mayAct } from "../state";
import { bytes, moment, visible } from "../text";
import { Ask } from "../ui/parts";
import { save } from "../ui/save";
import { Editor } from "./Editor";

function join(directory: string, name: string): string {
  return `${directory === "/" ? "" : directory}/${name}`;
}

function above(path: string): string {
  return path.slice(0, path.lastIndexOf("/")) || "/";
}

function ordered(list: FileInfo[]): FileInfo[] {
  const rank = (item: FileInfo): number => (item.kind === "directory" ? 0 : 1);
  return [...list].sort((one, other) => rank(one) - rank(other) || (one.name < other.name ? -1 : 1));
}

function mode(item: FileInfo): string {
  return (item.mode ?? 0).toString(8).padStart(4, "0");
}

function Row({ item, onOpen, onSave, onRemove }: {
  item: FileInfo;
  onOpen: () => void;
  onSave: () => void;
  onRemove: () => Promise<void>;
}) {
  return (
    <tr>
      <td>
        <button class="link" onClick={onOpen} disabled={item.kind === "other"}>
          {item.kind === "directory" ? "▸ " : ""}
          {visible(item.name)}
        </button>
        {item.target && <span class="dim"> → {visible(item.target)}</span>}
      </td>
      <td class="number">{item.kind === "file" ? bytes(item.size ?? 0) : item.kind}</td>
      <td class="wide mono">
        {mode(item)} {item.uid ?? 0}:{item.gid ?? 0}
      </td>
      <td class="wide">{moment(item.modified_at)}</td>
      <td class="buttons">
        <button class="plain" onClick={onSave}>
          Download
        </button>
        <Ask title={`Delete ${visible(item.name)}${item.kind === "directory" ? " with all in it" : ""}?`} act={onRemove}>
          Delete
        </Ask>
      </td>
    </tr>
  );
}

export function FilesTab({ id }: { id: string }) {
  const path = useSignal("/");
  const list = useSignal<FileInfo[] | null>(null);
  const open = useSignal<string | null>(null);
  const load = async (): Promise<void> => {
    const at = path.value;
    const result = await attempt(() => api.entries(id, at));
    if (at === path.value) list.value = result ? ordered(result) : [];
  };
  const go = (to: string): void => {
    open.value = null;
    path.value = to;
    void load();
  };
  useEffect(() => void load(), [id]);
  const upload = async (files: FileList | null): Promise<void> => {
    for (const file of files ?? []) await attempt(() => api.writeFile(id, join(path.value, file.name), file), `${file.name} is there.`);
    await load();
  };
  const take = (item: FileInfo): void => {
    const from = join(path.value, item.name);
    const work = item.kind === "file" ? api.readFile(id, from) : api.download(id, from).then((answer) => answer.arrayBuffer());
    void attempt(async () => save(item.kind === "file" ? item.name : `${item.name}.tar`, await work));
  };
  const remove = async (item: FileInfo): Promise<void> => {
    await attempt(() => api.removeFile(id, join(path.value, item.name)), "Deleted.");
    await load();
  };
  if (open.value !== null) return <Editor key={open.value} id={id} path={open.value} onClose={() => go(path.value)} />;
  return (
    <div class="column">
      <form
        class="bar-of-tools"
        onSubmit={(event) => {
          event.preventDefault();
          go(new FormData(event.currentTarget).get("path") as string);
        }}
      >
        <button type="button" class="plain" disabled={path.value === "/"} onClick={() => go(above(path.value))}>
          Up
        </button>
        <input class="grow mono" name="path" aria-label="Path" key={path.value} defaultValue={path.value} />
        <button type="button" class="plain" onClick={() => void load()}>
          Reload
        </button>
        {mayAct.value && (
          <label class="button">
            Upload
            <input type="file" multiple class="unseen" aria-label="Upload" onChange={(event) => void upload(event.currentTarget.files)} />
          </label>
        )}
      </form>
      <div class="scroll">
        <table>
          <tbody>
            {(list.value ?? []).map((item) => (
              <Row
                key={item.name}
                item={item}
                onOpen={() => {
                  if (item.kind === "file") open.value = join(path.value, item.name);
                  else go(join(path.value, item.name));
                }}
                onSave={() => take(item)}
                onRemove={() => remove(item)}
              />
            ))}
          </tbody>
        </table>
      </div>
      {list.value?.length === 0 && <p class="dim">Nothing is here.</p>}
    </div>
  );
}
