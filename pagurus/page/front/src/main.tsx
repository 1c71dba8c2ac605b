import { render } from "preact";
import { App } from "./App";
import { recall } from "./state";

void recall();
render(<App />, document.getElementById("page")!);
