// The form for an admin token. It is hidden until the server asks for a token.

import { setToken, token } from "./api.js";
import { make, newId } from "./dom.js";

/**
 * Returns whether another token can change a response with this status. A server without admin tokens answers 403 to a
 * request without a token: no token would help.
 */
export const tokenHelps = (status) => status === 401 || (status === 403 && token() !== "");

/** Creates the form. Calls `use` when the user has entered a token. */
export function tokenForm(use) {
  const id = newId("token");
  const input = make("input", {
    id,
    type: "password",
    name: "token",
    value: token(),
    autocomplete: "off",
    spellcheck: false,
  });
  const onsubmit = (event) => {
    event.preventDefault();
    setToken(input.value);
    use();
  };
  const label = make("label", { for: id }, "Admin token");
  return make("form", { class: "bar token", hidden: true, onsubmit }, label, input, make("button", { type: "submit" }, "Use"));
}
