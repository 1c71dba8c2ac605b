// Text from a sandbox, made safe to look at. Everything on this page is set as text and never parsed as HTML; what is
// left is characters that change how others look: they are shown by their number.

const ODD =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\uef80-\uefff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/g;
const BLOCK =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

function escaped(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  // A byte of a name that is not UTF-8, as the API tells it.
  if (code >= 0xef80 && code <= 0xefff) return `\\x${(code - 0xef00).toString(16)}`;
  return `\\u{${code.toString(16)}}`;
}

/** One line, such as a name or a command: nothing in it can hide or turn its neighbours around. */
export function visible(text: string): string {
  return text.replace(ODD, escaped);
}

/** Many lines, such as the content of a file: tabs and line ends stay. */
export function visibleBlock(text: string): string {
  return text.replace(/\r\n/g, "\n").replace(BLOCK, escaped);
}

export function bytes(count: number | null | undefined): string {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** A limit as people write it ("1GiB"), in bytes. */
export function parseBytes(limit: string | number | null | undefined): number | null {
  if (limit === null || limit === undefined) return null;
  if (typeof limit === "number") return limit;
  const parts = /^\s*([\d.]+)\s*([KMGT]?)i?B?\s*$/i.exec(limit);
  if (!parts) return null;
  return Number(parts[1]) * 1024 ** " KMGT".indexOf((parts[2] ?? "").toUpperCase() || " ");
}

export function duration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export function ms(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value < 10 ? `${value.toFixed(1)} ms` : value < 2000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

export function clock(at: number): string {
  return new Date(at * 1000).toLocaleTimeString(undefined, { hour12: false });
}

export function moment(at: number | null | undefined): string {
  return at ? new Date(at * 1000).toLocaleString(undefined, { hour12: false }) : "–";
}

export function fromBase64(text: string | undefined): Uint8Array<ArrayBuffer> {
  const raw = atob(text ?? "");
  const result = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index += 1) result[index] = raw.charCodeAt(index);
  return result;
}

export function decoded(text: string | undefined): string {
  return new TextDecoder().decode(fromBase64(text));
}
