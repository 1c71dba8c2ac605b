// One page, few files, no request to anywhere else. What is built goes to ../built, where the daemon looks for it.
import { defineConfig } from "vite";

export default defineConfig({
  base: "/page/",
  build: {
    outDir: "../built",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
