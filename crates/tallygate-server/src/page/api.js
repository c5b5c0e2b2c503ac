// Requests to the server. A failure is a `Problem` with the message of the server.

/** An error response of the server, or no response. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

// The token of the user. Only this browser tab keeps it, until it is closed.
const TOKEN = "tallygate-token";

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

// A link that ends in `#token=…` passes a token. The token is removed from the address and the history.
const tokenInLink = /^#token=([!-~]+)$/.exec(location.hash);
if (tokenInLink) {
  setToken(tokenInLink[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

export const credentials = () => (token() ? { authorization: `Bearer ${token()}` } : {});

export async function post(path, body) {
  return (await send(path, { method: "POST", body: JSON.stringify(body) })).json();
}

/** Sends a request and returns the status, header fields and text of the response. */
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

/** Returns the detail of a problem+json response. */
export function detailOf(text, status) {
  try {
    return JSON.parse(text).detail ?? `the server answered with status ${status}`;
  } catch {
    return `the server answered with status ${status}`;
  }
}
