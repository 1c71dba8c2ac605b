// What the whole page shares: who is logged in, where the reader is, what failed last, and values that are asked for
// again and again while somebody looks.

import { computed, effect, signal, type Signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { ApiError, call, hasKey, loggedOut, setKey } from "./api/client";
import type { LoginInfo } from "./api/schema";

// ------------------------------------------------------------------ the login

export const login = signal<LoginInfo | null>(null);
export const ready = signal(false); // it is known whether there is a login

const ACTING = ["exec", "admin"];
export const mayAct = computed(() => ACTING.includes(login.value?.scope ?? ""));
export const hasDaemon = computed(() => login.value?.scope !== "run");
export const isCluster = computed(() => Boolean(login.value?.cluster));
export const isAdmin = computed(() => login.value?.scope === "admin");
export const seesOwn = computed(() => ["read", ...ACTING].includes(login.value?.scope ?? "")); // sandboxes of its owner
export const seesTotals = computed(() => ["monitor", "admin"].includes(login.value?.scope ?? "")); // of all owners

effect(() => {
  if (loggedOut.value) login.value = null;
});

export async function recall(): Promise<void> {
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  try {
    if (code) {
      history.replaceState(null, "", "/");
      await enter(code);
    } else if (hasKey()) {
      login.value = remembered(); // what is shown before the answer; the daemon decides about each call
      ready.value = login.value !== null;
      remember(await call<LoginInfo>("GET", "/v1/login"));
    }
  } catch (error) {
    const away = error instanceof ApiError && error.status === 0; // a daemon that is replaced comes back
    if (!away) login.value = null;
  }
  ready.value = true;
}

const LOGIN = "pagurus.login";

function remembered(): LoginInfo | null {
  try {
    return JSON.parse(localStorage.getItem(LOGIN) ?? "null") as LoginInfo | null;
  } catch {
    return null;
  }
}

function remember(info: LoginInfo): void {
  const { key: _, ...shown } = info;
  const text = JSON.stringify(shown);
  localStorage.setItem(LOGIN, text);
  if (text !== JSON.stringify(login.value)) login.value = shown;
}

export async function enter(token: string): Promise<void> {
  const made = await call<LoginInfo>("POST", "/v1/login", { body: { token } });
  setKey(made.key ?? null);
  loggedOut.value = false;
  remember(made);
}

export async function leave(): Promise<void> {
  await call("DELETE", "/v1/login").catch(() => undefined);
  setKey(null);
  localStorage.removeItem(LOGIN);
  login.value = null;
}

// ------------------------------------------------------------------ where the reader is

function parts(): string[] {
  return location.hash.replace(/^#\/?/, "").split("/").map(safelyDecoded);
}

function safelyDecoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const route = signal<string[]>(parts());
addEventListener("hashchange", () => {
  route.value = parts();
});

export function link(...names: string[]): string {
  return `#/${names.map(encodeURIComponent).join("/")}`;
}

// ------------------------------------------------------------------ what happened

export interface Notice {
  id: number;
  text: string;
  hint: string;
  bad: boolean;
}

export const notices = signal<Notice[]>([]);
let number = 0;

export function notify(text: string, hint = "", bad = false): void {
  number += 1;
  const made = { id: number, text, hint, bad };
  notices.value = [...notices.value.slice(-4), made];
  setTimeout(() => dismiss(made.id), bad ? 12_000 : 5_000);
}

export function dismiss(id: number): void {
  notices.value = notices.value.filter((item) => item.id !== id);
}

export function complain(error: unknown): void {
  if (error instanceof DOMException && error.name === "AbortError") return;
  if (error instanceof ApiError) notify(error.message, error.hint, true);
  else notify(String(error), "", true);
}

/** Does something that may fail; says so when it does. */
export async function attempt<T>(work: () => Promise<T>, done = ""): Promise<T | undefined> {
  try {
    const result = await work();
    if (done) notify(done);
    return result;
  } catch (error) {
    complain(error);
    return undefined;
  }
}

// ------------------------------------------------------------------ values that change

export interface Live<T> {
  value: Signal<T | null>;
  error: Signal<string>;
  refresh: () => void;
}

/** Whether two values are the same, or are made of the same parts. */
function same(one: unknown, other: unknown): boolean {
  if (one === other) return true;
  if (!one || !other || typeof one !== "object" || typeof other !== "object") return false;
  const parts = Object.entries(one);
  return parts.length === Object.keys(other).length && parts.every(([name, part]) => (other as Record<string, unknown>)[name] === part);
}

/** What `ask` answers, again every `seconds` while the page is looked at. `key`: of what is asked for. */
export function useLive<T>(key: string, ask: (signal: AbortSignal) => Promise<T>, seconds: number): Live<T> {
  const live = useMemo<Live<T>>(
    () => ({ value: signal<T | null>(null), error: signal(""), refresh: () => undefined }),
    [key],
  );
  useEffect(() => {
    let timer = 0;
    const ending = new AbortController();
    const again = async (): Promise<void> => {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          const result = await ask(ending.signal);
          if (!same(result, live.value.value)) live.value.value = result; // what is equal draws nothing again
          live.error.value = "";
        } catch (error) {
          if (ending.signal.aborted) return;
          live.error.value = error instanceof Error ? error.message : String(error);
        }
      }
      if (!ending.signal.aborted && seconds > 0) timer = window.setTimeout(again, seconds * 1000);
    };
    live.refresh = () => void again();
    const shown = (): void => {
      if (!document.hidden) void again();
    };
    document.addEventListener("visibilitychange", shown);
    void again();
    return () => {
      ending.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [key]);
  return live;
}
