import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { ApiToken, NewToken, TokenRequest } from "../api/schema";
import { attempt, useLive } from "../state";
import { moment, visible } from "../text";
import { Chip, Copy } from "../ui/parts";

const SCOPES: NonNullable<TokenRequest["scope"]>[] = ["read", "exec", "admin", "monitor"];

function state(item: ApiToken): string {
  if (item.revoked_at) return "revoked";
  return item.expires_at && item.expires_at * 1000 < Date.now() ? "expired" : "valid";
}

function Create({ owners, onMade }: { owners: string[]; onMade: (made: NewToken) => void }) {
  const name = useSignal("");
  const scope = useSignal<NonNullable<TokenRequest["scope"]>>("exec");
  const days = useSignal("");
  const owner = useSignal("");
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    const lifetime = days.value ? Number(days.value) * 86_400 : null;
    const made = await attempt(() => api.createToken({ name: name.value, scope: scope.value, lifetime, owner: owner.value || null }));
    if (made) onMade(made);
    name.value = "";
  };
  return (
    <form class="bar-of-tools" onSubmit={(event) => void submit(event)}>
      <input aria-label="Name" placeholder="whom it is for" required value={name} onInput={(event) => (name.value = event.currentTarget.value)} />
      <select aria-label="Scope" value={scope} onChange={(event) => (scope.value = event.currentTarget.value as typeof scope.value)}>
        {SCOPES.map((item) => (
          <option key={item}>{item}</option>
        ))}
      </select>
      <input aria-label="Days" type="number" min={0.01} step="any" placeholder="days, or for ever" value={days} onInput={(event) => (days.value = event.currentTarget.value)} />
      <input
        aria-label="Owner"
        list="owners"
        title="it sees and shares the sandboxes of this owner; without one it sees those that it makes"
        placeholder="owner, or its own"
        value={owner}
        onInput={(event) => (owner.value = event.currentTarget.value)}
      />
      <datalist id="owners">
        {owners.map((item) => (
          <option key={item} value={item} />
        ))}
      </datalist>
      <button type="submit">Create</button>
    </form>
  );
}

export function TokensView() {
  const live = useLive("tokens", (signal) => api.tokens({ signal }), 5);
  const made = useSignal<NewToken | null>(null);
  const revoke = async (item: ApiToken): Promise<void> => {
    await attempt(() => api.revokeToken(item.id), "Revoked.");
    live.refresh();
  };
  return (
    <section>
      <h1>Tokens</h1>
      <Create
        owners={[...new Set((live.value.value ?? []).map((item) => item.owner))]}
        onMade={(token) => {
          made.value = token;
          live.refresh();
        }}
      />
      {made.value && (
        <div class="notice">
          <div>
            <div>The text of “{visible(made.value.token.name)}”, told this once:</div>
            <Copy text={made.value.text} />
          </div>
        </div>
      )}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th>Name</th>
              <th>Scope</th>
              <th>Owner</th>
              <th>State</th>
              <th class="wide">Made</th>
              <th class="wide">Ends</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {[...(live.value.value ?? [])].reverse().map((item) => (
              <tr key={item.id}>
                <td>
                  <b>{visible(item.name)}</b> <span class="dim">{item.id}</span>
                </td>
                <td>{item.scope}</td>
                <td>{visible(item.owner)}</td>
                <td>
                  <Chip kind={state(item)}>{state(item)}</Chip>
                </td>
                <td class="wide">{moment(item.created_at)}</td>
                <td class="wide">{moment(item.expires_at)}</td>
                <td class="buttons">
                  {state(item) === "valid" && (
                    <button class="danger" onClick={() => void revoke(item)}>
                      Revoke
                    </button>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
