/** Lets the browser save bytes as a file. Its type is none that a browser shows, whatever is in it. */
export function save(name: string, data: BlobPart): void {
  const url = URL.createObjectURL(new Blob([data], { type: "application/octet-stream" }));
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = name.replace(/[^\w.+-]/g, "_");
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
