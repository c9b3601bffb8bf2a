// Formatting of figures. An unknown value is a dash, never a zero.

export const UNKNOWN = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

const SCALES = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

function scaled(value, unit) {
  for (const [scale, prefix] of SCALES) {
    if (Math.abs(value) >= scale) return `${digits(value / scale)} ${prefix}${unit}`.trim();
  }
  return `${digits(value)} ${unit}`.trim();
}

/** Formats three significant digits: 4.21, 42.1, 421. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toString();
  return value.toFixed(size >= 10 ? 1 : 2);
}

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : UNKNOWN);
export const large = (value) => (known(value) ? scaled(value, "") : UNKNOWN);
export const bytes = (value) => (known(value) ? scaled(value, "B") : UNKNOWN);
export const rate = (value) => (known(value) ? scaled(value, "B/s") : UNKNOWN);
export const percent = (value) => (known(value) ? `${digits(100 * value)} %` : UNKNOWN);

/** Formats a round number for an axis. */
export const plain = (value) => String(Number(value.toPrecision(6)));

export function loss(value) {
  if (!known(value)) return UNKNOWN;
  return Math.abs(value) >= 0.001 || value === 0 ? value.toFixed(3) : value.toExponential(1);
}

/** Formats a figure of run.log. */
export function figure(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/** Formats a number with its word: 1 round, 2 rounds. */
export const counted = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Formats seconds. */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds > 0 && seconds < 0.001) return "under 1 ms";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  if (whole < 600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ""}`; // as terminals say it
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const two = (value) => String(value).padStart(2, "0");

/** Formats the local time of day, with the date if it is not today's. */
export function clock(at) {
  if (!known(at)) return UNKNOWN;
  const date = new Date(1000 * at);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return date.toDateString() === new Date().toDateString() ? time : `${day(date)} ${time}`;
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const day = (date) => `${date.getDate()} ${MONTHS[date.getMonth()]}`;

/** Formats a tick of a time axis, as precise as its step. */
export function tick(at, stepSeconds) {
  const date = new Date(1000 * at);
  if (stepSeconds >= 86_400) return day(date);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (stepSeconds < 60) return `${time}:${two(date.getSeconds())}`;
  return date.getHours() === 0 && date.getMinutes() === 0 ? day(date) : time;
}

/** Returns the first digits of a peer's id. */
export const short = (peer) => peer.slice(0, 8);
