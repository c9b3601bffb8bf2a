// Runs before the first paint, so that a chosen theme never flashes: a classic script, not a module.
(() => {
  const THEMES = ["auto", "light", "dark"];

  const stored = () => {
    try {
      return localStorage.getItem("holdfast-theme");
    } catch {
      return null; // storage is disabled: use the system's theme, and the toggle for this page only
    }
  };

  const use = (theme) => {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("holdfast-theme", theme);
    } catch {
      // as above
    }
    document.dispatchEvent(new Event("themechange"));
  };

  const first = stored();
  document.documentElement.dataset.theme = THEMES.includes(first) ? first : "auto";

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("themechange"));
  });

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const say = () => {
      button.textContent = `Theme: ${document.documentElement.dataset.theme}`;
    };
    button.addEventListener("click", () => {
      const now = THEMES.indexOf(document.documentElement.dataset.theme);
      use(THEMES[(now + 1) % THEMES.length]);
      say();
    });
    say();
  });
})();
