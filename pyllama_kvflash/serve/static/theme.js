// Sets the theme, light or dark, before anything is drawn: the user's choice, else the system's.
{
  const NAME = "kvflash.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null; // a browser may block the storage
    }
  };
  const set = (choice) => {
    root.dataset.chosen = ["light", "dark"].includes(choice) ? choice : "system";
    root.dataset.theme = root.dataset.chosen === "system" ? (dark.matches ? "dark" : "light") : root.dataset.chosen;
  };
  set(stored());
  dark.addEventListener("change", () => set(root.dataset.chosen));
  addEventListener("storage", (event) => {
    if (event.key === NAME) set(event.newValue); // another tab
  });
  document.addEventListener("change", ({ target }) => {
    if (target.id !== "theme") return;
    set(target.value);
    try {
      localStorage.setItem(NAME, target.value);
    } catch { /* blocked: it lasts as long as the page */ }
  });
}
