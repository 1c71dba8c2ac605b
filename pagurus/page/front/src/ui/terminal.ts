// xterm.js under a policy without inline styles. It writes its rules into <style> elements and into style attributes,
// both of which the policy refuses. Elements that it makes do the same by the CSSOM, which is allowed: a rule goes to a
// stylesheet of the document, a style attribute to the element's own style. (Preact makes elements by createElementNS.)

import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import "@xterm/xterm/css/xterm.css";

function sheetFor(element: HTMLElement): void {
  const sheet = new CSSStyleSheet();
  let text = "";
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  Object.defineProperty(element, "textContent", {
    get: () => text,
    set: (value: string) => {
      text = value;
      sheet.replaceSync(value);
    },
  });
  const remove = element.remove.bind(element);
  element.remove = () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((item) => item !== sheet);
    remove();
  };
}

const plain = document.createElement.bind(document);

document.createElement = ((tag: string, options?: ElementCreationOptions): HTMLElement => {
  if (tag === "style") {
    const stand = plain("i"); // takes the place of the <style>, and shows nothing
    stand.hidden = true;
    sheetFor(stand);
    return stand;
  }
  const element = plain(tag, options);
  element.setAttribute = (name: string, value: string) => {
    if (name === "style") element.style.cssText = value;
    else Element.prototype.setAttribute.call(element, name, value);
  };
  return element;
}) as typeof document.createElement;

export interface Screen {
  terminal: Terminal;
  fit: () => void;
  close: () => void;
}

/** A terminal in `element`. No addon that opens links or writes the clipboard: what a sandbox prints does nothing. */
export function screen(element: HTMLElement): Screen {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const terminal = new Terminal({
    fontFamily: "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace",
    fontSize: 13,
    scrollback: 10_000,
    cursorBlink: true,
    screenReaderMode: false,
    linkHandler: { activate: () => undefined },
    theme: dark ? { background: "#14171c", foreground: "#e6e8eb" } : { background: "#ffffff", foreground: "#1c2024", cursor: "#1c2024", selectionBackground: "#b9d3f5" },
  });
  for (const code of [0, 1, 2, 8, 52]) terminal.parser.registerOscHandler(code, () => true); // titles, links, clipboard
  const addon = new FitAddon();
  terminal.loadAddon(addon);
  terminal.open(element);
  const observer = new ResizeObserver(() => addon.fit());
  observer.observe(element);
  addon.fit();
  return {
    terminal,
    fit: () => addon.fit(),
    close: () => {
      observer.disconnect();
      terminal.dispose();
    },
  };
}
