// Requests to the daemon. The bearer token is stored in this tab only, and sent with actions only.

const TOKEN = "holdfast-token";
let inMemory = null; // used if session storage is disabled

export const token = {
  get() {
    try {
      return sessionStorage.getItem(TOKEN);
    } catch {
      return inMemory;
    }
  },
  set(value) {
    try {
      sessionStorage.setItem(TOKEN, value);
    } catch {
      inMemory = value;
    }
    document.dispatchEvent(new Event("tokenchange"));
  },
  forget() {
    try {
      sessionStorage.removeItem(TOKEN);
    } catch {
      inMemory = null;
    }
    document.dispatchEvent(new Event("tokenchange"));
  },
};

/** An error answer of the daemon. `refused` is true if it rejected the token. */
export class ApiError extends Error {
  constructor(status, body) {
    super(body.error ?? `the daemon answered ${status}`);
    this.hint = body.hint ?? "";
    this.status = status;
    this.refused = status === 401;
  }
}

const ANSWER_MS = 10_000;

/** Sends `GET api/NAME`; throws TypeError if the daemon does not answer. */
export async function get(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== "");
  const search = new URLSearchParams(given).toString();
  return read(
    await fetch(`api/${name}${search && `?${search}`}`, {
      cache: "no-store",
      signal: AbortSignal.timeout(ANSWER_MS),
    }),
  );
}

/** Sends `POST api/NAME` with the token, without a time limit. */
export async function post(name, body) {
  return read(
    await fetch(`api/${name}`, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${token.get() ?? ""}` },
      body: JSON.stringify(body),
    }),
  );
}

async function read(response) {
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body);
  return body;
}
