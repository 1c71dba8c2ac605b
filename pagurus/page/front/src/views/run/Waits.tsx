// What the rollout does at this moment, and why who waits.

import * as api from "../../api/calls";
import { hasDaemon, link, useLive } from "../../state";
import { duration, visible } from "../../text";

const STALE = 5; // seconds after which a status is no longer of a living process

export function WaitsView() {
  const live = useLive("run/status", (signal) => api.runStatus({ signal }), 2);
  const status = live.value.value;
  if (!status) return <p class="dim">{visible(live.error.value) || "…"}</p>;
  const age = Date.now() / 1000 - status.at;
  const since = (at: number | null | undefined): string => (typeof at === "number" ? duration(status.at - at) : "");
  return (
    <>
      <p>
        {age < STALE ? "The rollout lives" : `The rollout wrote last ${duration(age)} ago`}; policy version {status.version}, step {status.step}, the
        trainer is {visible(status.trainer)}
        {status.requested_at !== null && `; it has waited ${since(status.requested_at)} for a batch`}.
      </p>
      <h2>Who waits</h2>
      {status.waits.length === 0 && <p class="dim">Nobody.</p>}
      <ul data-testid="waits">
        {status.waits.map((wait, number) => (
          <li key={number}>
            <b>{visible(wait.who)}</b> {visible(wait.reason)} <span class="dim">{since(wait.since)}</span>
          </li>
        ))}
      </ul>
      <h2>Prompts</h2>
      <p>
        {Object.entries(status.account)
          .map(([name, count]) => `${count} ${name.replace("_", " ")}`)
          .join(", ")}
      </p>
      <h2>On their way</h2>
      {status.running.length === 0 && <p class="dim">None.</p>}
      <div class="scroll">
        <table>
          <tbody>
            {status.running.map((item) => (
              <tr key={item.name}>
                <td>{visible(item.name)}</td>
                <td>turn {item.turn}</td>
                <td class="wide">{item.tokens} tokens</td>
                <td>
                  {visible(item.doing)} <span class="dim">{since(item.since)}</span>
                </td>
                <td>{item.sandbox && (hasDaemon.value ? <a href={link("s", item.sandbox)}>{item.sandbox}</a> : item.sandbox)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
