// Small pieces that the views are made of.

import type { ComponentChild, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { useSignal, type Signal } from "@preact/signals";
import { mayAct } from "../state";

/** A button that acts on a sandbox: off for those who may only read. */
export function Act({ onClick, children, title, danger, off }: {
  onClick: () => void;
  children: ComponentChild;
  title?: string;
  danger?: boolean;
  off?: boolean;
}) {
  const allowed = mayAct.value;
  return (
    <button
      type="button"
      class={danger ? "danger" : ""}
      disabled={!allowed || off}
      title={allowed ? title : "this token may only read"}
      onClick={onClick}
    >
      {children}
    </button>
  );
}

/** A bar of `value` against `limit`; without a limit the number alone. */
export function Bar({ value, limit, text }: { value: number; limit: number | null; text: string }) {
  const share = limit ? Math.min(1, value / limit) : 0;
  return (
    <span class="bar" title={text}>
      {limit !== null && <span class={share > 0.9 ? "fill high" : "fill"} style={{ width: `${share * 100}%` }} />}
      <span class="over">{text}</span>
    </span>
  );
}

export function Chip({ kind, children }: { kind?: string; children: ComponentChild }) {
  return <span class={kind ? `chip ${kind}` : "chip"}>{children}</span>;
}

export function Copy({ text }: { text: string }) {
  const done = useSignal(false);
  const copy = async (): Promise<void> => {
    await navigator.clipboard?.writeText(text);
    done.value = true;
  };
  return (
    <div class="copy">
      <pre>{text}</pre>
      <button type="button" onClick={() => void copy()}>
        {done.value ? "Copied" : "Copy"}
      </button>
    </div>
  );
}

/** A question before something cannot be undone, or for a word. Esc leaves it. */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChild }) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => element.current?.showModal(), []);
  return (
    <dialog ref={element} onClose={onClose} aria-label={title}>
      <h2>{title}</h2>
      {children}
    </dialog>
  );
}

/** A button that asks before it does something, in a dialog. */
export function Ask({ title, act, children, danger, plain }: {
  title: string;
  act: () => Promise<unknown>;
  children: string;
  danger?: boolean;
  plain?: boolean; // it needs no right to act on sandboxes
}) {
  const asking = useSignal(false);
  const carryOut = async (): Promise<void> => {
    await act();
    asking.value = false;
  };
  const open = (): void => {
    asking.value = true;
  };
  return (
    <>
      {plain ? (
        <button type="button" class={danger ? "danger" : ""} onClick={open}>
          {children}…
        </button>
      ) : (
        <Act danger={danger ?? false} onClick={open}>
          {children}…
        </Act>
      )}
      {asking.value && (
        <Dialog title={title} onClose={() => (asking.value = false)}>
          <div class="buttons">
            <button type="button" class="plain" onClick={() => (asking.value = false)}>
              Cancel
            </button>
            <button type="button" class="danger" onClick={() => void carryOut()}>
              {children}
            </button>
          </div>
        </Dialog>
      )}
    </>
  );
}

/** Rows of one height, of which only those in sight are there. */
export function Rows<T>({ items, height, row, head, label, role, behind, sight: shared }: {
  items: T[];
  height: number;
  row: (item: T, index: number) => JSX.Element;
  head?: ComponentChild; // what the columns are called
  label: string;
  role?: "listbox"; // of rows that are options
  behind?: ComponentChild; // what stays in sight while the rows move
  sight?: Signal<{ top: number; size: number }>; // of whoever draws behind
}) {
  const element = useRef<HTMLDivElement>(null);
  const own = useSignal({ top: 0, size: 800 });
  const sight = shared ?? own;
  useEffect(() => {
    const at = element.current!;
    const look = (): void => {
      sight.value = { top: at.scrollTop, size: at.clientHeight };
    };
    look();
    const observer = new ResizeObserver(look);
    observer.observe(at);
    at.addEventListener("scroll", look, { passive: true });
    return () => {
      observer.disconnect();
      at.removeEventListener("scroll", look);
    };
  }, []);
  const first = Math.max(0, Math.floor(sight.value.top / height) - 8);
  const last = Math.min(items.length, Math.ceil((sight.value.top + sight.value.size) / height) + 8);
  return (
    <div class="listing">
      {head}
      <div class="rows" ref={element} role={role ?? "group"} aria-label={label} tabIndex={0}>
        {behind && <div class="behind">{behind}</div>}
        <div class="all" style={{ height: `${items.length * height}px` }}>
          <div class="shown" style={{ transform: `translateY(${first * height}px)` }}>
            {items.slice(first, last).map((item, index) => row(item, first + index))}
          </div>
        </div>
      </div>
    </div>
  );
}
