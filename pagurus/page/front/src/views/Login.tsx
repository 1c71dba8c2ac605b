import { useSignal } from "@preact/signals";
import { attempt, enter } from "../state";

export function LoginView() {
  const token = useSignal("");
  const submit = (event: Event): void => {
    event.preventDefault();
    void attempt(() => enter(token.value.trim()));
  };
  return (
    <main class="login">
      <h1>Pagurus</h1>
      <form onSubmit={submit}>
        <label for="token">Token</label>
        <input
          id="token"
          type="password"
          autocomplete="current-password"
          autofocus
          required
          value={token}
          onInput={(event) => {
            token.value = event.currentTarget.value;
          }}
        />
        <button type="submit">Log in</button>
      </form>
      <p class="dim">
        Make one on the host with <code>pagurus token create NAME</code>; with <code>--scope read</code> it sees and does
        nothing. On the host itself <code>pagurus view</code> needs none.
      </p>
    </main>
  );
}
