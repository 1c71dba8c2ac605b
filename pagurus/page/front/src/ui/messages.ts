// The messages of one exchange with a model, from what was sent: OpenAI's chat completions and responses, Anthropic's
// messages, whole or as a stream. What has another form is shown as it is. Pure.

export interface Said {
  role: string;
  text: string;
}

type Json = Record<string, unknown>;

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function object(value: unknown): Json {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? (value as Json) : {};
}

function list(value: unknown): unknown[] {
  return Array.isArray(value) ? value : [];
}

/** The text of a content, which is a string or a list of blocks. */
function textOf(content: unknown): string {
  if (typeof content === "string") return content;
  return list(content)
    .map((item) => {
      const block = object(item);
      if (typeof block.text === "string") return block.text;
      if (typeof block.thinking === "string") return block.thinking;
      return JSON.stringify(block, null, 1);
    })
    .join("\n");
}

function calls(message: Json): string {
  return list(message.tool_calls)
    .map((item) => {
      const called = object(object(item).function);
      return `\n→ ${String(called.name)}(${String(called.arguments ?? "")})`;
    })
    .join("");
}

function message(value: unknown): Said {
  const item = object(value);
  const role = typeof item.role === "string" ? item.role : String(item.type ?? "?");
  return { role, text: (item.content === undefined && !item.tool_calls ? JSON.stringify(item, null, 1) : textOf(item.content)) + calls(item) };
}

function asked(request: string): Said[] {
  const body = object(parsed(request));
  const system = body.system ?? body.instructions;
  const first = system ? [{ role: "system", text: textOf(system) }] : [];
  if (Array.isArray(body.messages)) return [...first, ...body.messages.map(message)];
  if (typeof body.input === "string") return [...first, { role: "user", text: body.input }];
  if (Array.isArray(body.input)) return [...first, ...body.input.map(message)];
  if (typeof body.prompt === "string") return [{ role: "prompt", text: body.prompt }];
  return [{ role: "request", text: request }];
}

/** The events of a stream, put together. */
function streamed(response: string): string {
  const events = response.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  let text = "";
  for (const line of events) {
    const event = object(parsed(line.slice(5).trim()));
    const delta = object(object(list(event.choices)[0]).delta);
    const other = object(event.delta);
    text += String(delta.content ?? other.text ?? other.thinking ?? (typeof event.delta === "string" ? event.delta : ""));
    text += calls(delta);
    if (typeof other.partial_json === "string") text += other.partial_json;
  }
  return text;
}

function answered(response: string): Said {
  const body = object(parsed(response));
  const choice = object(list(body.choices)[0]);
  if (choice.message) return { ...message(choice.message), role: "assistant" };
  if (typeof choice.text === "string") return { role: "assistant", text: choice.text };
  if (body.content !== undefined) return { role: "assistant", text: textOf(body.content) };
  if (Array.isArray(body.output)) return { role: "assistant", text: body.output.map((item) => message(item).text).join("\n") };
  if (response.includes("data:")) return { role: "assistant", text: streamed(response) };
  return { role: "answer", text: response };
}

export function messages(request: string, response: string): Said[] {
  return response ? [...asked(request), answered(response)] : asked(request);
}
