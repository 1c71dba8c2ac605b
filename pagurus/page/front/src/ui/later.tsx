// Parts of the page that come when they are first shown: a terminal or charts take longer to load than all the rest.

import type { ComponentType } from "preact";
import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { notify } from "../state";

/** The component that `load` brings. */
export function later<P extends object>(load: () => Promise<ComponentType<P>>): ComponentType<P> {
  let Loaded: ComponentType<P> | null = null;
  return (props: P) => {
    const there = useSignal(Loaded !== null);
    useEffect(() => {
      if (Loaded) return;
      load().then(
        (loaded) => {
          Loaded = loaded;
          there.value = true;
        },
        () => notify("A part of this page could not be loaded.", "Reload it: the daemon may be a newer one.", true),
      );
    }, []);
    return there.value && Loaded ? <Loaded {...props} /> : <p class="wait">…</p>;
  };
}
