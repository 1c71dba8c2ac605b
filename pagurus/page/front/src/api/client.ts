// The one way from this page to the API: the browser's cookie and the key of its login together, JSON, errors as they
// are. Nothing here knows a route.

import { signal } from "@preact/signals";
import type { ErrorBody } from "./schema";

const KEY = "pagurus.key";
const HEADER = "X-Pagurus-Page";
const PROTOCOL = "pagurus";

/** Whether the last answer said that no login is good any more. */
export const loggedOut = signal(false);

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly hint: string,
  ) {
    super(message);
  }
}

export function setKey(key: string | null): void {
  if (key === null) localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, key);
}

export function hasKey(): boolean {
  return shownKey() !== "";
}

function shownKey(): string {
  return localStorage.getItem(KEY) ?? "";
}

export type Query = Record<string, string | number | boolean | null | undefined>;

export function address(path: string, query: Query = {}): string {
  const parts = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = parts.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(String(value))}`).join("&");
  return text ? `${path}?${text}` : path;
}

/** A part of a path. */
export function part(text: string): string {
  return encodeURIComponent(text);
}

interface Options {
  query?: Query;
  body?: unknown;
  raw?: BodyInit;
  signal?: AbortSignal;
}

/** Sends a request; the answer if it is a good one. Raises ApiError. */
export async function send(method: string, path: string, options: Options = {}): Promise<Response> {
  const headers: Record<string, string> = { Accept: "application/json", [HEADER]: shownKey() };
  let body: BodyInit | undefined = options.raw;
  if (options.body !== undefined) {
    body = JSON.stringify(options.body);
    headers["Content-Type"] = "application/json";
  } else if (body !== undefined) {
    headers["Content-Type"] = "application/octet-stream";
  }
  let answer: Response;
  try {
    answer = await fetch(address(path, options.query), {
      method,
      headers,
      body: body ?? null,
      credentials: "same-origin",
      cache: "no-store",
      signal: options.signal ?? null,
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "the daemon does not answer", "is it being replaced?");
  }
  if (answer.ok) return answer;
  throw await refusal(answer);
}

async function refusal(answer: Response): Promise<ApiError> {
  const said = (await answer.json().catch(() => ({}))) as Partial<ErrorBody>;
  if (answer.status === 401) loggedOut.value = true;
  return new ApiError(answer.status, said.code ?? "failed", said.message ?? answer.statusText, said.hint ?? "");
}

const MAX_KEPT = 8; // answers
const kept = new Map<string, { text: string; value: unknown }>(); // by address, the newest last
const early = new Map<string, Promise<Response>>();

/** An equal answer to the same question is the same value, which nobody changes. */
export async function call<T>(method: string, path: string, options: Options = {}): Promise<T> {
  const key = method === "GET" ? address(path, options.query) : "";
  const begun = early.get(key);
  early.delete(key);
  const text = await (await (begun ?? send(method, path, options))).text();
  const before = kept.get(key);
  if (before?.text === text) return before.value as T;
  const value = JSON.parse(text) as T;
  if (key) {
    kept.delete(key);
    kept.set(key, { text, value });
    if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value!);
  }
  return value;
}

/** Sends a question that will be put in a moment. */
export function ahead(path: string): void {
  const begun = send("GET", path);
  begun.catch(() => undefined); // whoever puts it sees why
  early.set(path, begun);
}

/** The values of a stream, one a line, as they come. */
export async function* lines<T>(method: string, path: string, options: Options = {}): AsyncGenerator<T> {
  const answer = await send(method, path, options);
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const complete = (rest + value).split("\n");
    rest = complete.pop() ?? "";
    for (const line of complete) if (line) yield JSON.parse(line) as T;
  }
}

/** A WebSocket of the API. The key is its second protocol, for a browser gives it no headers. */
export function socket(path: string, query: Query = {}): WebSocket {
  const url = new URL(address(path, query), location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  const made = new WebSocket(url, [PROTOCOL, shownKey() || "none"]);
  made.binaryType = "arraybuffer";
  return made;
}
