// What the server is asked. A failure is a `Problem` with the server's own words.

/** What the server said instead of an answer. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

// The token of who looks on: for this tab of the browser only, and gone with it.
const TOKEN = "tallygate-token";

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

// A link that ends in `#token=…` hands a token over. It does not stay in the address, nor in the history.
const handedOver = /^#token=([!-~]+)$/.exec(location.hash);
if (handedOver) {
  setToken(handedOver[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

export const credentials = () => (token() ? { authorization: `Bearer ${token()}` } : {});

export async function post(path, body) {
  return (await send(path, { method: "POST", body: JSON.stringify(body) })).json();
}

/** The whole reply: its status, header fields and text. */
export async function postWhole(path, body) {
  const reply = await fetch(path, { method: "POST", headers: credentials(), body: JSON.stringify(body) });
  return { status: reply.status, ok: reply.ok, fields: [...reply.headers], text: await reply.text() };
}

export async function getText(path) {
  return (await send(path, {})).text();
}

export async function get(path) {
  return (await send(path, {})).json();
}

async function send(path, options) {
  let reply;
  try {
    reply = await fetch(path, { cache: "no-store", headers: credentials(), ...options });
  } catch {
    throw new Problem(0, "the server does not answer");
  }
  if (!reply.ok) throw new Problem(reply.status, detailOf(await reply.text(), reply.status));
  return reply;
}

/** What a problem+json says. */
export function detailOf(text, status) {
  try {
    return JSON.parse(text).detail ?? `the server said ${status}`;
  } catch {
    return `the server said ${status}`;
  }
}
