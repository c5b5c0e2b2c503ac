// Sets the theme before the first paint: light or dark, as the system or the user chose. Code that draws with colors of the
// style sheet listens to the event `theme` of the document.
"use strict";
{
  const KEPT = "tallygate-theme";
  const THEMES = ["system", "light", "dark"];
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => (THEMES.includes(localStorage.getItem(KEPT)) ? localStorage.getItem(KEPT) : "system");
  const put = () => {
    const theme = chosen();
    document.documentElement.dataset.theme = theme === "system" ? (isDark.matches ? "dark" : "light") : theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
    document.dispatchEvent(new Event("theme"));
  };
  isDark.addEventListener("change", put);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      localStorage.setItem(KEPT, THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length]);
      put();
    });
    put();
  });
  put();
}
